// Attention in float32, of decode rows and of prefill chunks alike.
//
// Grid: num_ctas, each looping over the units (segment, KV head, lane tile). One CTA takes all that
// a tile sees: warp w pages w, w + kWarps, ... in reading order, two of them in flight by cp.async;
// the warps' parts are added in their order. So a lane's result depends on its query, its pages and
// how much it sees alone. The first split of a segment stands for it, the others are passed over.
// Products and sums are written as fmaf and the like where two instantiations of the code, or its
// masked and plain halves, must agree to the bit.
//
// Bytes: each page's K and V once a lane tile. Floor: at decode those of one unit / what one SM can
// read, some 100 GB/s; at prefill 2 D multiplications a lane and token / the float32 rate.
#include <type_traits>

#include "ops/cuda/check.h"
#include "ops/cuda/float.h"
#include "ops/cuda/types.cuh"
#include "ops/cuda/units.cuh"

namespace oasis::cuda {
namespace {

constexpr int kStages = 2;
constexpr int kWeightRow = kLaneTile + 4;  // padded, so that no two writes meet in a bank
// As many warps as shared memory has room for.
constexpr int warps_for(int head_dim) { return 768 / head_dim; }

template <int D>
struct WarpMemory {
  float pages[kStages][2 * kBlockTokens][D];  // K rows, then V rows; at the end [lane][D] sums
  float weights[kBlockTokens][kWeightRow];    // [token][lane]; -1: not seen
  float corrections[kLaneTile], tops[kLaneTile], sums[kLaneTile];
};

template <int D>
struct SharedMemory {
  float q[kLaneTile][D];  // scaled, so that scores are in powers of two
  WarpMemory<D> warps[warps_for(D)];
};

// One page's K and V of a head. Chunk c (16 bytes) of key row r lies at c ^ (r % 8), so that the
// same chunk of eight rows is read from different banks.
template <int D>
__device__ void load_page(const float* from, float* stage, int lane) {
  constexpr int kChunks = D / 4;
  const uint32_t to = shared_address(stage);
#pragma unroll
  for (int i = lane; i < 2 * kBlockTokens * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    copy_async(to + (row * kChunks + (row < kBlockTokens ? chunk ^ (row & 7) : chunk)) * 16,
               from + i * 4);
  }
}

// o[lane][column] += weight[lane][token] * value[token][column], in the order of the tokens.
template <int D, int kGroups, bool kMasked>
__device__ void add_values(const WarpMemory<D>& mine, int stage, int lane,
                           float (&o)[4 * kGroups][D / 32]) {
  using Columns = std::conditional_t<D == 64, float2, float4>;
#pragma unroll 4
  for (int j = 0; j < kBlockTokens; ++j) {
    const Columns columns =
        reinterpret_cast<const Columns*>(mine.pages[stage][kBlockTokens + j])[lane];
    const float* v = reinterpret_cast<const float*>(&columns);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 four = reinterpret_cast<const float4*>(mine.weights[j])[g];
      const float* w = reinterpret_cast<const float*>(&four);
#pragma unroll
      for (int l = 0; l < 4; ++l)
#pragma unroll
        for (int d = 0; d < D / 32; ++d)  // not a weight of 0: an unseen value may be NaN
          if (!kMasked || !(w[l] < 0.0f)) o[4 * g + l][d] = fmaf(w[l], v[d], o[4 * g + l][d]);
    }
  }
}

// A warp's part of a tile, into its tops, sums and pages. For scores a thread is 4 kGroups lanes
// (lane / 8, + 4, ...) x 2 tokens (lane % 8, + 8); for values all lanes x D / 32 columns.
template <int D, int kGroups>
__device__ void attend(const Attention& a, const AttentionUnit& u, int lanes,
                       SharedMemory<D>& shared) {
  constexpr int kWarps = warps_for(D), kChunks = D / 4, kColumns = D / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = lane / 8, token = lane % 8;
  WarpMemory<D>& mine = shared.warps[warp];
  const int lane0 = u.tile * kLaneTile, group = a.heads.group;
  const int all_see = u.segment.visible + lane0 / group;
  const int pages =
      (u.segment.visible + (lane0 + lanes - 1) / group + kBlockTokens - 1) / kBlockTokens;
  const int32_t* list = a.pages + u.segment.pages0;
  constexpr int64_t kHeadFloats = 2 * kBlockTokens * D;
  const int64_t page_floats = a.heads.num_kv_heads * kHeadFloats;
  const float* head = static_cast<const float*>(a.pool) + u.head * kHeadFloats;
  int ahead = warp, id = ahead < pages ? list[ahead] : 0;
  auto fetch = [&](int stage) {
    if (ahead < pages) load_page<D>(head + id * page_floats, mine.pages[stage][0], lane);
    commit_copies();
    ahead += kWarps;
    id = ahead < pages ? list[ahead] : 0;  // one step ahead of its use
  };
  for (int s = 0; s < kStages; ++s) fetch(s);

  float o[4 * kGroups][kColumns] = {}, tops[kGroups], sums[kGroups] = {};
  int seen[kGroups];  // tokens that this thread's lanes see
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    tops[g] = -INFINITY;
    seen[g] = u.segment.visible + (lane0 + 4 * g + first) / group;
  }
  int stage = 0;
  for (int page = warp; page < pages; page += kWarps) {
    wait_copies<kStages - 1>();
    __syncwarp();
    float s[kGroups][2] = {};
    const float4* keys[2] = {reinterpret_cast<const float4*>(mine.pages[stage][token]),
                             reinterpret_cast<const float4*>(mine.pages[stage][token + 8])};
#pragma unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const float4 k0 = keys[0][c ^ token], k1 = keys[1][c ^ token];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float4 q = reinterpret_cast<const float4*>(shared.q[4 * g + first])[c];
        s[g][0] = dot(q, k0, s[g][0]);
        s[g][1] = dot(q, k1, s[g][1]);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool sees[2] = {page * kBlockTokens + token < seen[g],
                            page * kBlockTokens + token + 8 < seen[g]};
      float top = tops[g];
      for (int i = 0; i < 2; ++i)
        if (sees[i]) top = fmaxf(top, s[g][i]);
      for (int i = 1; i < 8; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      const float base = top == -INFINITY ? 0.0f : top;
      const float correction = exp2f(__fsub_rn(tops[g], base));
      float weights[2];
      for (int i = 0; i < 2; ++i) weights[i] = sees[i] ? exp2f(__fsub_rn(s[g][i], base)) : 0.0f;
      sums[g] = fmaf(sums[g], correction, __fadd_rn(weights[0], weights[1]));
      tops[g] = top;
      for (int i = 0; i < 2; ++i)
        mine.weights[token + 8 * i][4 * g + first] = sees[i] ? weights[i] : -1.0f;
      if (token == 0) mine.corrections[4 * g + first] = correction;
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < 4 * kGroups; ++l) {
      const float correction = mine.corrections[l];
#pragma unroll
      for (int d = 0; d < kColumns; ++d) o[l][d] = __fmul_rn(o[l][d], correction);
    }
    if ((page + 1) * kBlockTokens > all_see)
      add_values<D, kGroups, true>(mine, stage, lane, o);
    else
      add_values<D, kGroups, false>(mine, stage, lane, o);
    __syncwarp();  // all have read the stage and the weights
    fetch(stage);
    stage = (stage + 1) % kStages;
  }

#pragma unroll
  for (int l = 0; l < 4 * kGroups; ++l)
#pragma unroll
    for (int d = 0; d < kColumns; ++d) mine.pages[0][l][lane * kColumns + d] = o[l][d];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    for (int i = 1; i < 8; i *= 2) sums[g] = __fadd_rn(sums[g], __shfl_xor_sync(~0u, sums[g], i));
    if (token == 0) {
      mine.tops[4 * g + first] = tops[g];
      mine.sums[4 * g + first] = sums[g];
    }
  }
}

template <int D>
__global__ void __launch_bounds__(32 * warps_for(D), 1) attention_kernel(Attention a) {
  constexpr int kWarps = warps_for(D), kThreads = 32 * kWarps;
  extern __shared__ __align__(16) char memory[];
  SharedMemory<D>& shared = *reinterpret_cast<SharedMemory<D>*>(memory);
  const int units = *a.num_splits * a.heads.num_kv_heads * a.max_lane_tiles;
  const int group = a.heads.group, hq = a.heads.num_kv_heads * group;
  const float scale = 1.44269504f / sqrtf(static_cast<float>(D));

  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const AttentionUnit u = unit_at(a, unit);
    if (u.split.index != 0 || idle(a, u)) continue;
    const int lanes = min(kLaneTile, u.segment.rows * group - u.tile * kLaneTile);
    // Where the unit's element i of [lane][D] lies in q and in the output.
    auto at = [&](int i) {
      const int lane = u.tile * kLaneTile + i / D;
      return (static_cast<int64_t>(u.segment.row0 + lane / group) * hq + u.head * group +
              lane % group) *
                 D +
             i % D;
    };
    __syncthreads();  // the unit before is done with the shared memory
    for (int i = threadIdx.x; i < kLaneTile * D; i += kThreads)
      shared.q[i / D][i % D] = i < lanes * D ? static_cast<const float*>(a.q)[at(i)] * scale : 0.0f;
    __syncthreads();
    if (lanes <= 4)
      attend<D, 1>(a, u, lanes, shared);
    else
      attend<D, kLaneTile / 4>(a, u, lanes, shared);
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * D; i += kThreads) {
      const int lane = i / D;
      float top = -INFINITY, value = 0.0f, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.warps[w].tops[lane]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const WarpMemory<D>& part = shared.warps[w];
        const float weight = part.tops[lane] == -INFINITY ? 0.0f : exp2f(part.tops[lane] - top);
        value = fmaf(part.pages[0][lane][i % D], weight, value);
        sum = fmaf(part.sums[lane], weight, sum);
      }
      static_cast<float*>(a.out)[at(i)] = value / sum;
    }
  }
}

template <int D>
void launch(const Attention& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedMemory<D>);
  static const cudaError_t allowed = cudaFuncSetAttribute(
      attention_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(allowed, "attention: shared memory");
  attention_kernel<D><<<a.num_ctas, 32 * warps_for(D), kBytes, stream>>>(a);
  check(cudaGetLastError(), "attention");
}

}  // namespace

void attention_float(const Attention& a, cudaStream_t stream) {
  if (a.heads.head_dim == 64) return launch<64>(a, stream);
  if (a.heads.head_dim == 128) return launch<128>(a, stream);
  refuse("attention: head_dim", a.heads.head_dim, "64 or 128");
}

}  // namespace oasis::cuda
