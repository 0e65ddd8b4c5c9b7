// Token ids to rows of the embedding, rows that need logits, and drafts out of a request's tokens.
//
// embed, take_rows: one CTA a row, 16 bytes a thread at a time. Bytes: each row read and written
// once. propose_ngram: one CTA a request. Bytes: its tokens, 4 each, once. Floor: those bytes /
// memory bandwidth, or a launch; of propose_ngram also what one SM can read, about 100 GB/s.
#include "ops/cuda/tokens.h"

#include "ops/cuda/check.h"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 256, kNgramThreads = 1024, kLongest = 4;

__device__ void copy_row(const int4* from, int4* to, int64_t chunks) {
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) to[i] = from ? from[i] : int4{};
}

__global__ void __launch_bounds__(kThreads)
    embed_kernel(const Row* rows, TokenTables t, const int4* table, int4* x, int64_t chunks) {
  const Row r = rows[blockIdx.x];
  const int4* from = nullptr;
  if (r.position >= 0) {
    const int64_t request = r.request;
    const int32_t token = r.draft > 0 ? t.drafts[request * kMaxDrafts + r.draft - 1]
                                      : t.tokens[request * t.stride + r.position];
    from = table + token * chunks;
  }
  copy_row(from, x + blockIdx.x * chunks, chunks);
}

__global__ void __launch_bounds__(kThreads)
    take_kernel(const LogitsRow* rows, const int4* x, int4* y, int64_t chunks) {
  const int64_t row = rows[blockIdx.x].row;
  copy_row(row < 0 ? nullptr : x + row * chunks, y + blockIdx.x * chunks, chunks);
}

// A match that ends at position e, of length m, as one number: the longer is larger, then the
// later.
constexpr int kLengthBit = 29;

__global__ void __launch_bounds__(kNgramThreads)
    ngram_kernel(const int32_t* requests, TokenTables t, int count) {
  __shared__ uint32_t bests[kNgramThreads / 32];
  const int64_t request = requests[blockIdx.x];
  if (request < 0) return;
  const int32_t* x = t.tokens + request * t.stride;
  const int n = t.lengths[request];
  uint32_t best = 0;
  if (n > 1) {
    int32_t last[kLongest];  // backwards; a match of length m ends at m - 1 or later, so that what
                             // lies before the first token is never compared
    for (int j = 0; j < kLongest; ++j) last[j] = x[max(n - 1 - j, 0)];
    constexpr int kBatch = 4, kStep = kNgramThreads * 4;
    for (int i0 = threadIdx.x * 4; i0 < n - 1; i0 += kBatch * kStep) {
      int4 v[kBatch];  // all in flight before the first is used
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i0 + b * kStep < n - 1) v[b] = *reinterpret_cast<const int4*>(x + i0 + b * kStep);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int32_t four[4] = {v[b].x, v[b].y, v[b].z, v[b].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int e = i0 + b * kStep + k;
          if (e >= n - 1 || four[k] != last[0]) continue;
          uint32_t m = 1;
#pragma unroll
          for (int j = 1; j < kLongest; ++j)
            if (m == j && e >= j && x[e - j] == last[j]) ++m;
          best = max(best, m << kLengthBit | e);
        }
      }
    }
  }
  best = __reduce_max_sync(~0u, best);
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = __reduce_max_sync(~0u, bests[threadIdx.x]);
  if (threadIdx.x == 0) t.draft_counts[request] = best ? count : 0;
  if (best == 0 || static_cast<int>(threadIdx.x) >= count) return;
  const int start = (best & ((1u << kLengthBit) - 1)) + 1;
  // A match that runs into the end: what repeats goes on repeating.
  t.drafts[request * kMaxDrafts + threadIdx.x] = x[start + threadIdx.x % (n - start)];
}

}  // namespace

void embed(const Row* rows, int64_t num_rows, const TokenTables& tables, const void* table, void* x,
           int64_t row_bytes, cudaStream_t stream) {
  if (row_bytes % 16) refuse("embed: row_bytes", row_bytes, "a multiple of 16");
  if (num_rows == 0) return;
  embed_kernel<<<static_cast<unsigned>(num_rows), kThreads, 0, stream>>>(
      rows, tables, static_cast<const int4*>(table), static_cast<int4*>(x), row_bytes / 16);
  check(cudaGetLastError(), "embed");
}

void take_rows(const LogitsRow* rows, int64_t n, const void* x, void* y, int64_t row_bytes,
               cudaStream_t stream) {
  if (row_bytes % 16) refuse("take_rows: row_bytes", row_bytes, "a multiple of 16");
  if (n == 0) return;
  take_kernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(
      rows, static_cast<const int4*>(x), static_cast<int4*>(y), row_bytes / 16);
  check(cudaGetLastError(), "take_rows");
}

void propose_ngram(const int32_t* requests, int64_t n, const TokenTables& tables, int count,
                   cudaStream_t stream) {
  if (count < 1 || count > kMaxDrafts) refuse("propose_ngram: count", count, "1 to 16");
  if (tables.stride % 4) refuse("propose_ngram: stride", tables.stride, "a multiple of 4");
  if (n == 0) return;
  ngram_kernel<<<static_cast<unsigned>(n), kNgramThreads, 0, stream>>>(requests, tables, count);
  check(cudaGetLastError(), "propose_ngram");
}

}  // namespace oasis::cuda
