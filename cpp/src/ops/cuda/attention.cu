// Attention of decode rows over paged KV, in 16 bit; attention_float.cu is the other one.
//
// Grid: num_ctas, each looping over the units (split, KV head, lane tile). Four warps; warp w takes
// pages w, w + 4, ... of the split and keeps kStages of them in flight by itself, across the ends
// of units, so that the memory never idles while a unit is merged. A lane is a (query row, query
// head of the group); 16 lanes are the M of the tensor-core products. A segment's splits are merged
// in their order by the last CTA to arrive; a segment that is not split is written at once.
//
// Bytes: each page's K and V once a lane tile, plus (2 + D) * 64 bytes a split for the partial.
// Floor: those bytes / memory bandwidth.
#include "ops/cuda/check.h"
#include "ops/cuda/float.h"
#include "ops/cuda/types.cuh"
#include "ops/cuda/units.cuh"

namespace oasis::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

constexpr int stages_for(int head_dim) { return head_dim == 64 ? 4 : 2; }
constexpr int page_elements(int head_dim) { return 2 * kBlockTokens * head_dim; }
template <class T, int D>
constexpr int shared_bytes() {
  return kWarps * stages_for(D) * page_elements(D) * static_cast<int>(sizeof(T)) +
         kWarps * kLaneTile * (D + 8 + 2) * 4;
}

// Where a warp is in its CTA's sequence of pages. The page's id is read one step ahead of its use.
struct Cursor {
  int unit, page, end;  // page within the segment's list; page >= end: no unit is left
  const int32_t* list;
  const char* head;  // the unit's head in page 0
  int id;
};

template <class T, int D>
__device__ void find_next(const Attention& a, Cursor& c, int units, int warp) {
  while (c.page >= c.end) {
    c.unit += gridDim.x;
    if (c.unit >= units) return;
    const AttentionUnit u = unit_at(a, c.unit);
    if (idle(a, u)) continue;
    c.page = u.split.page_begin + warp;
    c.end = u.split.page_end;
    c.list = a.pages + u.segment.pages0;
    c.head = static_cast<const char*>(a.pool) +
             static_cast<int64_t>(u.head) * page_elements(D) * sizeof(T);
  }
  c.id = c.list[c.page];
}

// One page's K and V of a head into a stage. Row r's 16-byte chunk c lies at c ^ (r % 8), so that
// ldmatrix meets no bank twice.
template <class T, int D>
__device__ void load_page(const Attention& a, const Cursor& c, int units, uint32_t stage,
                          int lane) {
  if (c.unit < units) {
    const char* from =
        c.head + static_cast<int64_t>(c.id) * a.heads.num_kv_heads * page_elements(D) * sizeof(T);
    constexpr int kChunks = D * sizeof(T) / 16;  // a row
#pragma unroll
    for (int i = lane; i < 2 * kBlockTokens * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      copy_async(stage + (row * kChunks + (chunk ^ (row & 7))) * 16, from + i * 16);
    }
  }
  commit_copies();
}

// Element i of the unit's [lane][D] outputs.
template <class T, int D>
__device__ void store_output(const Attention& a, const AttentionUnit& u, int i, float value) {
  const int lane = u.tile * kLaneTile + i / D, row = lane / a.heads.group;
  const int head = u.head * a.heads.group + lane % a.heads.group,
            hq = a.heads.num_kv_heads * a.heads.group;
  static_cast<T*>(a.out)[(static_cast<int64_t>(u.segment.row0 + row) * hq + head) * D + i % D] =
      Element<T>::from_float(value);
}

// Adds to a counter; what the CTA wrote before the barrier before is visible to who sees the sum,
// and the other way round.
__device__ int arrive(int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// All splits of a segment (same head and tile) into the output, in their order. weights: kChunk x
// 16 floats of shared memory, and 256 more.
template <class T, int D>
__device__ void merge_splits(const Attention& a, const AttentionUnit& u, int first, int per_split,
                             int lanes, float* weights) {
  constexpr int kRows = kThreads / kLaneTile, kChunk = 64, kBatch = 8;
  const float* parts = a.partials + static_cast<int64_t>(first) * (2 + D) * kLaneTile;
  const int64_t stride = static_cast<int64_t>(per_split) * (2 + D) * kLaneTile;
  const int lane = threadIdx.x % kLaneTile, row = threadIdx.x / kLaneTile, count = u.split.count;
  float *reduce = weights + kChunk * kLaneTile, *totals = reduce + kRows * kLaneTile;
  auto across = [&](float x, auto op) {  // over the rows, in order; the same in all of them
    __syncthreads();
    reduce[row * kLaneTile + lane] = x;
    __syncthreads();
    float y = reduce[lane];
    for (int r = 1; r < kRows; ++r) y = op(y, reduce[r * kLaneTile + lane]);
    return y;
  };
  float top = -INFINITY, total = 0.0f;
  for (int s = row; s < count; s += kRows) top = fmaxf(top, __ldcg(parts + s * stride + lane));
  top = across(top, [](float x, float y) { return fmaxf(x, y); });
  constexpr int kEach = kLaneTile * D / 4 / kThreads;  // runs of four values a thread
  float4 value[kEach] = {};
  for (int s0 = 0; s0 < count; s0 += kChunk) {
    const int n = min(kChunk, count - s0);
    __syncthreads();
    for (int s = row; s < n; s += kRows) {
      const float* part = parts + (s0 + s) * stride;
      const float split_top = __ldcg(part + lane), sum = __ldcg(part + kLaneTile + lane);
      const float w = split_top == -INFINITY ? 0.0f : exp2f(split_top - top);
      weights[s * kLaneTile + lane] = w;
      total += sum * w;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = (threadIdx.x + e * kThreads) * 4;
      if (i >= lanes * D) continue;
      for (int s = 0; s < n; s += kBatch) {
        float4 x[kBatch];  // all in flight before the first is used
#pragma unroll
        for (int k = 0; k < kBatch; ++k)
          if (s + k < n)
            x[k] = __ldcg(
                reinterpret_cast<const float4*>(parts + (s0 + s + k) * stride + 2 * kLaneTile + i));
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (s + k >= n) break;
          const float w = weights[(s + k) * kLaneTile + i / D];
          value[e].x += x[k].x * w;
          value[e].y += x[k].y * w;
          value[e].z += x[k].z * w;
          value[e].w += x[k].w * w;
        }
      }
    }
  }
  total = across(total, [](float x, float y) { return x + y; });
  if (row == 0) totals[lane] = total;
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = (threadIdx.x + e * kThreads) * 4;
    if (i >= lanes * D) continue;
    const float inverse = 1.0f / totals[i / D];
    store_output<T, D>(a, u, i, value[e].x * inverse);
    store_output<T, D>(a, u, i + 1, value[e].y * inverse);
    store_output<T, D>(a, u, i + 2, value[e].z * inverse);
    store_output<T, D>(a, u, i + 3, value[e].w * inverse);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(Attention a) {
  constexpr int kStages = stages_for(D), kSteps = D / 16, kChunks = D * sizeof(T) / 16;
  constexpr int kStageBytes = page_elements(D) * sizeof(T);
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kPartRow = D + 8;  // padded, so that the stores below meet no bank twice
  float* parts =
      reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes);  // [warp][16][D + 8]
  float* tops = parts + kWarps * kLaneTile * kPartRow;                    // [warp][16]
  float* sums = tops + kWarps * kLaneTile;                                // [warp][16]
  __shared__ int last;
  const uint32_t stage0 = shared_address(shared) + warp * kStages * kStageBytes;
  const int units = *a.num_splits * a.heads.num_kv_heads * a.max_lane_tiles;
  const int hq = a.heads.num_kv_heads * a.heads.group;
  const float scale = 1.44269504f / sqrtf(static_cast<float>(D));  // scores in powers of two

  Cursor load{
      static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), 0, 0, nullptr, nullptr, 0};
  find_next<T, D>(a, load, units, warp);
  for (int s = 0; s < kStages; ++s) {
    load_page<T, D>(a, load, units, stage0 + s * kStageBytes, lane);
    load.page += kWarps;
    find_next<T, D>(a, load, units, warp);
  }
  int stage = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const AttentionUnit u = unit_at(a, unit);
    if (idle(a, u)) continue;
    const int lanes = min(kLaneTile, u.segment.rows * a.heads.group - u.tile * kLaneTile);
    // Query fragments: this thread holds lanes lane / 4 and lane / 4 + 8.
    uint32_t q[kSteps][4];
    int seen[2];  // tokens that its two lanes see
    const T* rows[2];
    for (int i = 0; i < 2; ++i) {
      const int l = u.tile * kLaneTile + min(lane / 4 + 8 * i, lanes - 1);
      const int row = l / a.heads.group, head = u.head * a.heads.group + l % a.heads.group;
      seen[i] = u.segment.visible + row;
      rows[i] =
          static_cast<const T*>(a.q) + (static_cast<int64_t>(u.segment.row0 + row) * hq + head) * D;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        q[k][i] =
            *reinterpret_cast<const uint32_t*>(rows[i % 2] + k * 16 + i / 2 * 8 + lane % 4 * 2);

    float o[D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (int p = u.split.page_begin + warp; p < u.split.page_end; p += kWarps) {
      wait_copies<kStages - 1>();
      __syncwarp();
      const uint32_t keys = stage0 + stage * kStageBytes, values = keys + kStageBytes / 2;
      float s[2][4] = {};
      // Matrices of ldmatrix: (tokens 0-7, low dims), (tokens 0-7, high), (8-15, low), (8-15,
      // high).
      const int key_row = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        ldmatrix(b, keys + (key_row * kChunks + ((k * 2 + lane / 8 % 2) ^ (key_row & 7))) * 16);
        Element<T>::mma(s[0], q[k], b[0], b[1]);
        Element<T>::mma(s[1], q[k], b[2], b[3]);
      }
      const int first = p * kBlockTokens + lane % 4 * 2;
      float high[2] = {top[0], top[1]};
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = first + n * 8 + i % 2;
          s[n][i] = token < seen[i / 2] ? s[n][i] * scale : -INFINITY;
          high[i / 2] = fmaxf(high[i / 2], s[n][i]);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 1));
        high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 2));
      }
      const float base[2] = {high[0] == -INFINITY ? 0.0f : high[0],
                             high[1] == -INFINITY ? 0.0f : high[1]};
      const float corr[2] = {exp2f(top[0] - base[0]), exp2f(top[1] - base[1])};
      top[0] = high[0];
      top[1] = high[1];
      sum[0] *= corr[0];
      sum[1] *= corr[1];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = exp2f(s[n][i] - base[i / 2]);
          sum[i / 2] += s[n][i];
        }
      const uint32_t weights[4] = {
          Element<T>::pack(s[0][0], s[0][1]), Element<T>::pack(s[0][2], s[0][3]),
          Element<T>::pack(s[1][0], s[1][1]), Element<T>::pack(s[1][2], s[1][3])};
      // What no lane may see is zeroed in place: a weight of 0 alone would let a NaN through.
      const int known = u.segment.visible + u.segment.rows - 1 - p * kBlockTokens;
      if (known < kBlockTokens) {
        for (int i = lane; i < (kBlockTokens - max(known, 0)) * kChunks; i += 32)
          *reinterpret_cast<int4*>(shared + (values - shared_address(shared)) +
                                   (max(known, 0) * kChunks + i) * 16) = int4{};
        __syncwarp();
      }
      const int value_row = lane % 16;
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t b[4];
        ldmatrix_transposed(
            b, values + (value_row * kChunks + ((d * 2 + lane / 16) ^ (value_row & 7))) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) o[2 * d + i][j] *= corr[j / 2];
        Element<T>::mma(o[2 * d], weights, b[0], b[1]);
        Element<T>::mma(o[2 * d + 1], weights, b[2], b[3]);
      }
      __syncwarp();  // all have read the stage
      load_page<T, D>(a, load, units, stage0 + stage * kStageBytes, lane);
      load.page += kWarps;
      find_next<T, D>(a, load, units, warp);
      stage = (stage + 1) % kStages;
    }

    // Each warp's part into shared memory, scaled to its own maximum; then all threads add the
    // four, in order.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      if (lane % 4 == 0) {
        tops[warp * kLaneTile + lane / 4 + 8 * i] = top[i];
        sums[warp * kLaneTile + lane / 4 + 8 * i] = sum[i];
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(parts + (warp * kLaneTile + lane / 4 + 8 * i) * kPartRow +
                                   n * 8 + lane % 4 * 2) = {o[n][2 * i], o[n][2 * i + 1]};
    __syncthreads();
    float* mine = a.partials + static_cast<int64_t>(unit) * (2 + D) * kLaneTile;
#pragma unroll 2
    for (int i = threadIdx.x; i < lanes * D; i += kThreads) {
      const int l = i / D;
      float all = -INFINITY, value = 0.0f, total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all = fmaxf(all, tops[w * kLaneTile + l]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight =
            tops[w * kLaneTile + l] == -INFINITY ? 0.0f : exp2f(tops[w * kLaneTile + l] - all);
        value += parts[(w * kLaneTile + l) * kPartRow + i % D] * weight;
        total += sums[w * kLaneTile + l] * weight;
      }
      if (u.split.count == 1) {
        store_output<T, D>(a, u, i, value / total);
        continue;
      }
      mine[2 * kLaneTile + i] = value;
      if (i % D == 0) {
        mine[l] = all;
        mine[kLaneTile + l] = total;
      }
    }
    __syncthreads();  // also: the shared memory may be written again
    if (u.split.count == 1) continue;
    const int per_split = a.heads.num_kv_heads * a.max_lane_tiles;
    const int first =
        unit - u.split.index * per_split;  // the segment's first split, same head and tile
    if (threadIdx.x == 0) {
      last = arrive(&a.arrivals[first]) == u.split.count - 1;
      if (last) a.arrivals[first] = 0;
    }
    __syncthreads();
    if (!last) continue;
    merge_splits<T, D>(a, u, first, per_split, lanes, parts);
    __syncthreads();
  }
}

template <class T, int D>
void launch(const Attention& a, cudaStream_t stream) {
  constexpr int kBytes = shared_bytes<T, D>();
  static const cudaError_t allowed = cudaFuncSetAttribute(
      attention_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(allowed, "attention: shared memory");
  attention_kernel<T, D><<<a.num_ctas, kThreads, kBytes, stream>>>(a);
  check(cudaGetLastError(), "attention");
}

template <class T>
void launch(const Attention& a, cudaStream_t stream) {
  if (a.heads.head_dim == 64) return launch<T, 64>(a, stream);
  if (a.heads.head_dim == 128) return launch<T, 128>(a, stream);
  refuse("attention: head_dim", a.heads.head_dim, "64 or 128");
}

}  // namespace

int64_t attention_partial_floats(int head_dim) {
  return static_cast<int64_t>(2 + head_dim) * kLaneTile;
}
int attention_ctas_per_sm() { return 2; }

void attention(const Attention& a, cudaStream_t stream) {
  if (a.dtype == DType::kBFloat16) return launch<BFloat16>(a, stream);
  if (a.dtype == DType::kFloat16) return launch<Half>(a, stream);
  attention_float(a, stream);
}

}  // namespace oasis::cuda
