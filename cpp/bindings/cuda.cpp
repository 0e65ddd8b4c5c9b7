// The CUDA kernels one by one, for the tests and `oasiskv bench kernels`: arguments by the names of
// their structs in ops/cuda/ops.h, arrays as device addresses. Nothing is checked here: a wrong
// address or shape is the caller's fault.
#include "bindings/cuda.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "backend/cuda/host_memory.h"
#include "ops/cuda/linear.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/prefill.h"
#include "ops/cuda/split.h"

namespace oasis {
namespace {

using cuda::Heads;

class Arguments {
 public:
  explicit Arguments(const py::kwargs& kwargs) : kwargs_(kwargs) {}

  template <class T>
  void read(T& to, const char* name) const {
    if constexpr (std::is_pointer_v<T>)
      to = reinterpret_cast<T>(kwargs_[name].cast<uintptr_t>());
    else
      to = kwargs_[name].cast<T>();
  }
  void read(DType& to, const char* name) const {
    to = dtype_from(kwargs_[name].cast<std::string>());
  }
  void read(SummaryKind& to, const char* name) const {
    to = summary_kind_from(kwargs_[name].cast<std::string>());
  }
  void read(GroupCombine& to, const char* name) const {
    to = group_combine_from(kwargs_[name].cast<std::string>());
  }
  void read(Heads& to, const char*) const {
    to = {kwargs_["num_kv_heads"].cast<int>(), kwargs_["group"].cast<int>(),
          kwargs_["head_dim"].cast<int>()};
  }
  cudaStream_t stream() const {
    return reinterpret_cast<cudaStream_t>(kwargs_["stream"].cast<uintptr_t>());
  }
  int number(const char* name) const { return kwargs_[name].cast<int>(); }

 private:
  const py::kwargs& kwargs_;
};

#define READ(field) args.read(a.field, #field)

void attention(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Attention a;
  READ(dtype), READ(heads), READ(q), READ(pool), READ(out), READ(segments), READ(pages),
      READ(splits), READ(num_splits);
  READ(max_lane_tiles), READ(partials), READ(arrivals), READ(num_ctas);
  cuda::attention(a, args.stream());
}

void prefill(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Prefill a;
  READ(dtype), READ(heads), READ(q), READ(pool), READ(out), READ(segments), READ(pages),
      READ(tiles), READ(num_tiles), READ(num_pages);
  cuda::prefill(a, args.stream());
}

void score(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Score a;
  READ(dtype), READ(heads), READ(kind), READ(staged), READ(summaries), READ(predictors),
      READ(summary_pages), READ(summary_stride);
  READ(splits), READ(num_splits), READ(max_lane_tiles), READ(scores), READ(num_ctas);
  cuda::score(a, args.stream());
}

void select(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Select a;
  READ(heads), READ(combine), READ(top_k), READ(fetch_cap), READ(sink_blocks), READ(element_bytes),
      READ(scores), READ(predictors);
  READ(num_predictors), READ(max_predictors), READ(max_blocks), READ(max_lanes), READ(step),
      READ(slot_blocks), READ(slot_steps);
  READ(first_choice), READ(slot_pages), READ(slot_stride), READ(host_units), READ(host_stride),
      READ(host_step), READ(host_offset);
  READ(host_base), READ(pool), READ(copies), READ(num_copies), READ(stats);
  cuda::select(a, args.stream());
}

void append(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Append a;
  READ(dtype), READ(heads), READ(qkv), READ(rows), READ(cos), READ(sin), READ(q_norm), READ(k_norm),
      READ(norm_eps), READ(q), READ(staged);
  READ(pool), READ(num_copies);
  cuda::append(a, args.number("num_rows"), {}, 0, args.stream());
}

void settle(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::Append rows = {};
  args.read(rows.dtype, "dtype"), args.read(rows.heads, "heads"), args.read(rows.pool, "pool");
  cuda::Settle a;
  READ(kind), READ(top_k), READ(blocks), READ(num_blocks), READ(summaries), READ(summary_pages);
  READ(summary_stride), READ(slot_blocks), READ(slot_steps), READ(slot_pages), READ(slot_stride),
      READ(step);
  cuda::append(rows, 0, a, args.number("max_blocks"), args.stream());
}

void write_through(const py::kwargs& kwargs) {
  const Arguments args(kwargs);
  cuda::WriteThrough a;
  READ(heads), READ(element_bytes), READ(layers), READ(blocks), READ(num_blocks), READ(pool),
      READ(layer_bytes);
  READ(host_units), READ(host_stride), READ(host_step), READ(host_offset), READ(host_base);
  cuda::write_through(a, args.number("num_ctas"), args.stream());
}

#undef READ

std::vector<std::array<int32_t, 3>> prefill_tiles(
    const std::vector<std::array<int32_t, 5>>& segments, int num_kv_heads, int group,
    int head_dim) {
  std::vector<cuda::Segment> list;
  for (const auto& [row0, rows, pages0, num_pages, visible] : segments)
    list.push_back({row0, rows, pages0, num_pages, visible});
  std::vector<std::array<int32_t, 3>> tiles;
  for (const cuda::PrefillTile& t : cuda::prefill_tiles(list, {num_kv_heads, group, head_dim}))
    tiles.push_back({t.segment, t.kv_head, t.lane_begin});
  return tiles;
}

void gather(uintptr_t copies, uintptr_t num_copies, int bytes, int num_ctas, int in_flight,
            uintptr_t stream, uintptr_t flag, uintptr_t arrivals, uintptr_t step) {
  cuda::gather(reinterpret_cast<const cuda::Copy*>(copies),
               reinterpret_cast<const int32_t*>(num_copies), bytes, num_ctas, in_flight,
               {reinterpret_cast<int64_t*>(flag), reinterpret_cast<int32_t*>(arrivals),
                reinterpret_cast<const int64_t*>(step)},
               reinterpret_cast<cudaStream_t>(stream));
}

void wait_flags(uintptr_t flags, int count, uintptr_t step, int64_t value, uintptr_t stream,
                uintptr_t predictors, uintptr_t num_predictors, uintptr_t stats) {
  cuda::wait_flags(
      reinterpret_cast<const int64_t*>(flags), count, reinterpret_cast<const int64_t*>(step), value,
      {reinterpret_cast<const cuda::Predictor*>(predictors),
       reinterpret_cast<const int32_t*>(num_predictors), reinterpret_cast<int64_t*>(stats)},
      reinterpret_cast<cudaStream_t>(stream));
}

void set_flags(uintptr_t flags, int count, uintptr_t step, int64_t value, uintptr_t stream) {
  cuda::set_flags(reinterpret_cast<int64_t*>(flags), count, reinterpret_cast<const int64_t*>(step),
                  value, reinterpret_cast<cudaStream_t>(stream));
}

void add_rms_norm(const std::string& dtype, uintptr_t x, uintptr_t residual, uintptr_t weight,
                  uintptr_t y, int64_t rows, int dim, float eps, uintptr_t stream) {
  cuda::add_rms_norm(dtype_from(dtype), reinterpret_cast<void*>(x),
                     reinterpret_cast<void*>(residual), reinterpret_cast<void*>(weight),
                     reinterpret_cast<void*>(y), rows, dim, eps,
                     reinterpret_cast<cudaStream_t>(stream));
}

void silu_mul(const std::string& dtype, uintptr_t gate_up, uintptr_t y, int64_t rows, int inter,
              uintptr_t stream) {
  cuda::silu_mul(dtype_from(dtype), reinterpret_cast<void*>(gate_up), reinterpret_cast<void*>(y),
                 rows, inter, reinterpret_cast<cudaStream_t>(stream));
}

void read(uintptr_t from, int64_t bytes, uintptr_t out, int num_ctas, uintptr_t stream) {
  cuda::read(reinterpret_cast<const void*>(from), bytes, reinterpret_cast<int*>(out), num_ctas,
             reinterpret_cast<cudaStream_t>(stream));
}

// Unpinning many GiB takes seconds, in which other threads may run.
struct DeleteWithoutGil {
  void operator()(cuda::HostMemory* memory) const {
    py::gil_scoped_release release;
    delete memory;
  }
};
using HostMemoryHolder = std::unique_ptr<cuda::HostMemory, DeleteWithoutGil>;

HostMemoryHolder host_memory(int64_t bytes, int numa_node, int num_threads,
                             const py::object& progress, int64_t chunk_bytes, int64_t assume_bytes,
                             const std::string& root) {
  cuda::HostMemory::Options o;
  o.bytes = bytes, o.numa_node = numa_node, o.num_threads = num_threads;
  o.chunk_bytes = chunk_bytes, o.assume_bytes = assume_bytes, o.root = root;
  o.progress = [&](int64_t done, int64_t total) {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C, without a callback too
    if (!progress.is_none()) progress(done, total);
  };
  py::gil_scoped_release release;
  return HostMemoryHolder(new cuda::HostMemory(o));
}

}  // namespace

void bind_cuda(py::module_& m) {
  using namespace py::literals;
  m.def("split_size", &cuda::split_size, "lengths"_a, "units_each"_a, "grid"_a, "fixed"_a);
  m.attr("lane_tile") = cuda::kLaneTile;
  m.attr("attention_ctas_per_sm") = cuda::attention_ctas_per_sm();
  m.attr("score_ctas_per_sm") = cuda::score_ctas_per_sm();
  m.def("attention_partial_floats", &cuda::attention_partial_floats);
  m.def("attention", &attention);
  m.attr("prefill_lanes") = cuda::kPrefillLanes;
  m.def("prefill_tiles", &prefill_tiles, "segments"_a, "num_kv_heads"_a, "group"_a, "head_dim"_a);
  m.def("prefill", &prefill);
  m.def("score", &score);
  m.def("select", &select);
  m.def("append", &append);
  m.def("settle", &settle);
  m.def("write_through", &write_through);
  m.def("gather", &gather, py::arg("copies"), py::arg("num_copies"), py::arg("bytes"),
        py::arg("num_ctas"), py::arg("in_flight"), py::arg("stream"), py::arg("flag") = 0,
        py::arg("arrivals") = 0, py::arg("step") = 0);
  m.def("wait_flags", &wait_flags, py::arg("flags"), py::arg("count"), py::arg("step"),
        py::arg("value"), py::arg("stream"), py::arg("predictors") = 0,
        py::arg("num_predictors") = 0, py::arg("stats") = 0);
  m.def("set_flags", &set_flags);
  m.def("add_rms_norm", &add_rms_norm);
  m.def("silu_mul", &silu_mul);
  m.def("read", &read);
  bind_cuda_tokens(m);
  py::class_<cuda::HostMemory, HostMemoryHolder>(m, "HostMemory", py::buffer_protocol())
      .def_buffer([](cuda::HostMemory& h) {  // numpy and torch arrays over it keep it alive
        return py::buffer_info(reinterpret_cast<uint8_t*>(h.data()), h.bytes());
      })
      .def(py::init(&host_memory), "bytes"_a, "numa_node"_a = -1, "num_threads"_a = 0,
           "progress"_a = py::none(), "chunk_bytes"_a = cuda::HostMemory::Options().chunk_bytes,
           "assume_bytes"_a = 0, "root"_a = "/")
      .def_property_readonly(
          "address",
          [](const cuda::HostMemory& h) { return reinterpret_cast<uintptr_t>(h.data()); })
      .def_property_readonly("bytes", &cuda::HostMemory::bytes)
      .def_property_readonly("chunk_bytes", &cuda::HostMemory::chunk_bytes)
      .def_property_readonly("numa_node", &cuda::HostMemory::numa_node)
      .def_property_readonly("seconds", &cuda::HostMemory::seconds);
  py::class_<cuda::Linear>(m, "Linear")
      .def(py::init<>())
      .def(
          "run",
          [](cuda::Linear& self, const std::string& dtype, int64_t rows, int64_t n, int64_t k,
             int sms, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t stream,
             bool float_out, int fixed_rows) {
            self.run({dtype_from(dtype), rows, n, k, bias != 0, sms, float_out, fixed_rows},
                     reinterpret_cast<void*>(x), reinterpret_cast<void*>(weight),
                     reinterpret_cast<void*>(bias), reinterpret_cast<void*>(y),
                     reinterpret_cast<cudaStream_t>(stream));
          },
          "dtype"_a, "rows"_a, "n"_a, "k"_a, "sms"_a, "x"_a, "weight"_a, "bias"_a, "y"_a,
          "stream"_a, "float_out"_a = false, "fixed_rows"_a = 0)
      .def(
          "tune",
          [](cuda::Linear& self, const std::string& dtype, int64_t rows, int64_t n, int64_t k,
             int sms, uintptr_t x, const std::vector<uintptr_t>& weights, uintptr_t bias,
             uintptr_t y, int repeats, uintptr_t stream, bool float_out, int fixed_rows) {
            std::vector<const void*> pointers;
            for (uintptr_t w : weights) pointers.push_back(reinterpret_cast<const void*>(w));
            return self.tune({dtype_from(dtype), rows, n, k, bias != 0, sms, float_out, fixed_rows},
                             reinterpret_cast<void*>(x), pointers, reinterpret_cast<void*>(bias),
                             reinterpret_cast<void*>(y), repeats,
                             reinterpret_cast<cudaStream_t>(stream));
          },
          "dtype"_a, "rows"_a, "n"_a, "k"_a, "sms"_a, "x"_a, "weights"_a, "bias"_a, "y"_a,
          "repeats"_a, "stream"_a, "float_out"_a = false, "fixed_rows"_a = 0);
}

}  // namespace oasis
