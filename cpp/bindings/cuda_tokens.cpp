// The CUDA operations on tokens (ops/cuda/tokens.h): arrays as device addresses. Nothing is checked
// here: a wrong address or shape is the caller's fault.
#include <pybind11/pybind11.h>

#include "bindings/cuda.h"
#include "ops/cuda/tokens.h"

namespace oasis {
namespace {

using cuda::TokenTables;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
cudaStream_t stream_at(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

cuda::Sample sample_from(uintptr_t logits, int vocab, uintptr_t rows, const TokenTables& tables,
                         uintptr_t work, uintptr_t result) {
  return {at<const float>(logits),         vocab,
          at<const cuda::LogitsRow>(rows), tables,
          at<cuda::SampleWork>(work),      at<int32_t>(result)};
}

}  // namespace

void bind_cuda_tokens(py::module_& m) {
  using namespace py::literals;
  m.attr("max_drafts") = cuda::kMaxDrafts;
  m.attr("sampling_bytes") = sizeof(cuda::Sampling);
  m.attr("sample_work_bytes") = sizeof(cuda::SampleWork);
  py::class_<TokenTables>(m, "TokenTables")
      .def(py::init([](uintptr_t tokens, int64_t stride, uintptr_t lengths, uintptr_t drafts,
                       uintptr_t draft_counts) {
             return TokenTables{at<int32_t>(tokens), stride, at<int32_t>(lengths),
                                at<int32_t>(drafts), at<int32_t>(draft_counts)};
           }),
           "tokens"_a, "stride"_a, "lengths"_a, "drafts"_a, "draft_counts"_a);
  m.def(
      "embed",
      [](uintptr_t rows, int64_t num_rows, const TokenTables& tables, uintptr_t table, uintptr_t x,
         int64_t row_bytes, uintptr_t stream) {
        cuda::embed(at<const cuda::Row>(rows), num_rows, tables, at<void>(table), at<void>(x),
                    row_bytes, stream_at(stream));
      },
      "rows"_a, "num_rows"_a, "tables"_a, "table"_a, "x"_a, "row_bytes"_a, "stream"_a);
  m.def(
      "take_rows",
      [](uintptr_t rows, int64_t n, uintptr_t x, uintptr_t y, int64_t row_bytes, uintptr_t stream) {
        cuda::take_rows(at<const cuda::LogitsRow>(rows), n, at<void>(x), at<void>(y), row_bytes,
                        stream_at(stream));
      },
      "rows"_a, "n"_a, "x"_a, "y"_a, "row_bytes"_a, "stream"_a);
  m.def(
      "sample_greedy",
      [](uintptr_t logits, int vocab, uintptr_t rows, int64_t n, const TokenTables& tables,
         uintptr_t work, uintptr_t result, uintptr_t stream) {
        cuda::sample_greedy(sample_from(logits, vocab, rows, tables, work, result), n,
                            stream_at(stream));
      },
      "logits"_a, "vocab"_a, "rows"_a, "n"_a, "tables"_a, "work"_a, "result"_a, "stream"_a);
  m.def(
      "sample_random",
      [](uintptr_t logits, int vocab, uintptr_t rows, int64_t n, const TokenTables& tables,
         uintptr_t sampling, uintptr_t work, uintptr_t result, uintptr_t stream) {
        cuda::sample_random(sample_from(logits, vocab, rows, tables, work, result),
                            at<const cuda::Sampling>(sampling), n, stream_at(stream));
      },
      "logits"_a, "vocab"_a, "rows"_a, "n"_a, "tables"_a, "sampling"_a, "work"_a, "result"_a,
      "stream"_a);
  m.def(
      "propose_ngram",
      [](uintptr_t requests, int64_t n, const TokenTables& tables, int count, uintptr_t stream) {
        cuda::propose_ngram(at<const int32_t>(requests), n, tables, count, stream_at(stream));
      },
      "requests"_a, "n"_a, "tables"_a, "count"_a, "stream"_a);
}

}  // namespace oasis
