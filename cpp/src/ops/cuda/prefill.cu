// Attention of prefill rows over paged KV, by mma.sync.
//
// Grid: a CTA a tile of 128 lanes; four warps of 32 lanes each, two CTAs an SM. The tile's queries
// stay in shared memory; keys and values come in steps of 64 tokens (four pages), two stages deep.
// Only the steps that reach past what the tile's first row sees are masked.
//
// Operations: 4 * D for each lane and token that it sees. Floor: those / the tensor cores' rate.
// Bytes: q and out once, K and V of what the tile sees once a tile, mostly from the L2 cache.
#include "ops/cuda/check.h"
#include "ops/cuda/prefill.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 128, kStep = 64, kStages = 2;
constexpr int kPages = kStep / kBlockTokens;  // a step

template <int D>
constexpr int shared_bytes() {
  return (kPrefillLanes + kStages * 2 * kStep) * D * 2;
}

// Rows of D elements: row r's 16-byte chunk c lies at c ^ (r % 8), so that ldmatrix meets no bank
// twice.
template <int D>
__device__ uint32_t chunk_at(uint32_t base, int row, int chunk) {
  return base + (row * (D / 8) + (chunk ^ (row & 7))) * 16;
}

// One instruction; 0 where the result would be subnormal.
__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Tile {
  Segment segment;
  int kv_head, lane_begin, lanes;
  int seen;  // tokens that its last lane sees
};

__device__ Tile tile_at(const Prefill& p, int index) {
  const PrefillTile t = p.tiles[index];
  Tile tile;
  tile.segment = p.segments[t.segment];
  tile.kv_head = t.kv_head;
  tile.lane_begin = t.lane_begin;
  tile.lanes = min(kPrefillLanes, tile.segment.rows * p.heads.group - t.lane_begin);
  tile.seen = tile.segment.visible + (t.lane_begin + tile.lanes - 1) / p.heads.group;
  return tile;
}

__device__ int row_of(const Prefill& p, const Tile& tile, int lane) {
  return (tile.lane_begin + min(lane, tile.lanes - 1)) / p.heads.group;
}

// Where a lane's D elements begin in q and out. Lanes past the end stand for the last one.
__device__ int64_t offset_of(const Prefill& p, const Tile& tile, int lane) {
  const int i = tile.lane_begin + min(lane, tile.lanes - 1);
  const int row = tile.segment.row0 + i / p.heads.group;
  const int head = tile.kv_head * p.heads.group + i % p.heads.group;
  return (static_cast<int64_t>(row) * p.heads.num_kv_heads * p.heads.group + head) *
         p.heads.head_dim;
}

// Keys, then values of a step into a stage; pages that the tile does not see are left out.
template <class T, int D>
__device__ void load_step(const Prefill& p, const Tile& tile, int step, uint32_t stage) {
  constexpr int kChunks = D / 8;
  const int num_pages = (tile.seen + kBlockTokens - 1) / kBlockTokens;
#pragma unroll 1
  for (int i = 0; i < kPages; ++i) {
    const int page = step * kPages + i;
    if (page >= num_pages) break;
    const int id = p.pages[tile.segment.pages0 + page];
    const T* from =
        static_cast<const T*>(p.pool) +
        (static_cast<int64_t>(id) * p.heads.num_kv_heads + tile.kv_head) * 2 * kBlockTokens * D;
#pragma unroll
    for (int j = threadIdx.x; j < 2 * kBlockTokens * kChunks; j += kThreads) {
      const int row = j / kChunks, half = row / kBlockTokens;  // 0: a key, 1: a value
      copy_async(
          chunk_at<D>(stage, half * kStep + i * kBlockTokens + row % kBlockTokens, j % kChunks),
          from + j * 8);
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2) prefill_kernel(Prefill p) {
  constexpr int kChunks = D / 8, kStageBytes = 2 * kStep * D * 2;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t queries = shared_address(shared), stages = queries + kPrefillLanes * D * 2;
  const Tile tile = tile_at(p, blockIdx.x);
  const float scale = 1.44269504f / sqrtf(static_cast<float>(D));  // scores in powers of two

  for (int i = threadIdx.x; i < kPrefillLanes * kChunks; i += kThreads)
    copy_async(chunk_at<D>(queries, i / kChunks, i % kChunks),
               static_cast<const T*>(p.q) + offset_of(p, tile, i / kChunks) + i % kChunks * 8);
  load_step<T, D>(p, tile, 0, stages);
  commit_copies();

  // This thread holds the lanes first_lane + 8 * i, i < 4: pair i / 2 of an mma's rows i % 2.
  const int first_lane = warp * 32 + lane / 4;
  int seen[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) seen[i] = tile.segment.visible + row_of(p, tile, first_lane + 8 * i);
  const int unmasked = tile.segment.visible + row_of(p, tile, 0);  // tokens that all lanes see

  float o[2][D / 8][4] = {};
  float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[4] = {};
  const int steps = (tile.seen + kStep - 1) / kStep;
  for (int step = 0; step < steps; ++step) {
    const uint32_t keys = stages + step % kStages * kStageBytes, values = keys + kStep * D * 2;
    wait_copies<0>();
    __syncthreads();  // the step is here, and all have read the one before
    if (step + 1 < steps)
      load_step<T, D>(p, tile, step + 1, stages + (step + 1) % kStages * kStageBytes);
    commit_copies();

    float s[2][kStep / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        ldmatrix(a[m], chunk_at<D>(queries, warp * 32 + m * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        uint32_t b[4];
        ldmatrix(b, chunk_at<D>(keys, n * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Element<T>::mma(s[m][2 * n], a[m], b[0], b[1]);
          Element<T>::mma(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    if ((step + 1) * kStep > unmasked) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = step * kStep + n * 8 + lane % 4 * 2 + i % 2;
            if (token >= seen[m * 2 + i / 2]) s[m][n][i] = -INFINITY;
          }
    }
    // What no lane sees is zeroed in place: a weight of 0 alone would let a NaN through.
    const int known = tile.seen - step * kStep;
    if (known < kStep) {
      for (int i = threadIdx.x; i < (kStep - known) * kChunks; i += kThreads)
        *reinterpret_cast<int4*>(shared + (values - queries) + (known * kChunks + i) * 16) = int4{};
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float high = top[i];
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
        high = fmaxf(high, fmaxf(s[i / 2][n][i % 2 * 2], s[i / 2][n][i % 2 * 2 + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      // Finite: every lane sees the first token, which is in the first step.
      const float correction = exp2_fast((top[i] - high) * scale);
      top[i] = high;
      sum[i] *= correction;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) o[i / 2][n][i % 2 * 2 + j] *= correction;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[i / 2][n][i % 2 * 2 + j];
          x = exp2_fast(fmaf(x, scale, -high * scale));
          sum[i] += x;
        }
    }
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] =
              Element<T>::pack(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        ldmatrix_transposed(b, chunk_at<D>(values, k * 16 + lane % 16, n * 2 + lane / 16));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Element<T>::mma(o[m][2 * n], a[m], b[0], b[1]);
          Element<T>::mma(o[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    if (first_lane + 8 * i >= tile.lanes) continue;
    const float inverse = 1.0f / sum[i];
    T* to = static_cast<T*>(p.out) + offset_of(p, tile, first_lane + 8 * i) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8) =
          Element<T>::pack(o[i / 2][n][i % 2 * 2] * inverse, o[i / 2][n][i % 2 * 2 + 1] * inverse);
  }
}

template <class T, int D>
void launch(const Prefill& p, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<D>();
  static const cudaError_t allowed = cudaFuncSetAttribute(
      prefill_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(allowed, "prefill: shared memory");
  prefill_kernel<T, D><<<p.num_tiles, kThreads, kBytes, stream>>>(p);
  check(cudaGetLastError(), "prefill");
}

template <class T>
void launch(const Prefill& p, cudaStream_t stream) {
  if (p.heads.head_dim == 64) return launch<T, 64>(p, stream);
  if (p.heads.head_dim == 128) return launch<T, 128>(p, stream);
  refuse("prefill: head_dim", p.heads.head_dim, "64 or 128");
}

}  // namespace

void prefill(const Prefill& p, cudaStream_t stream) {
  if (p.num_tiles == 0) return;
  if (p.dtype == DType::kBFloat16) return launch<BFloat16>(p, stream);
  if (p.dtype == DType::kFloat16) return launch<Half>(p, stream);
  refuse("prefill: dtype", static_cast<int>(p.dtype), "float16 or bfloat16");
}

}  // namespace oasis::cuda
