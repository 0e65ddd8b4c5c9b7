// Scores in float32: what score.cu computes, written where it writes it.
//
// Grid: num_ctas, each looping over the units (split, KV head, lane tile). The tile's two factors
// lie in shared memory. Four warps, 16 blocks each at a time; a thread takes 4 lanes x 2 blocks and
// sums over the elements in their order, so that a score depends on its query and its block alone.
// Sums of integers are exact as long as float32 holds them.
//
// Bytes: each summary once a lane tile (8 D bytes), 4 bytes a lane and block written. Floor: those
// bytes / memory bandwidth, or 2 D multiplications a lane and block at the float32 rate.
#include "ops/cuda/check.h"
#include "ops/cuda/float.h"
#include "ops/cuda/types.cuh"
#include "ops/cuda/units.cuh"

namespace oasis::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kPiece = 16, kGroups = kLaneTile / 4;

template <int D>
__global__ void __launch_bounds__(kThreads, 3) score_kernel(Score s) {
  constexpr int kChunks = D / 4;
  __shared__ __align__(16) float factors[2][kLaneTile][D];
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 / 8, block = threadIdx.x % 8;
  const int group = s.heads.group, hq = s.heads.num_kv_heads * group;
  const int units = *s.num_splits * s.heads.num_kv_heads * s.max_lane_tiles;
  const float4* summaries = static_cast<const float4*>(s.summaries);

  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const ScoreUnit u = unit_at(s, unit);
    if (idle(s, u)) continue;
    const Predictor& p = u.predictor;
    const int lane0 = u.tile * kLaneTile, all_lanes = p.staged_rows * group;
    const int lanes = min(kLaneTile, all_lanes - lane0), end = u.split.block_end;
    __syncthreads();  // the unit before is done with the factors
    for (int i = threadIdx.x; i < kLaneTile * D; i += kThreads) {
      const int lane = lane0 + min(i / D, lanes - 1);
      const int64_t row = p.staged0 + lane / group;
      const float q = static_cast<const float*>(
          s.staged)[(row * hq + u.head * group + lane % group) * D + i % D];
      for (int v = 0; v < 2; ++v) factors[v][i / D][i % D] = score_factor(q, s.kind, v);
    }
    __syncthreads();
    const int32_t* table = s.summary_pages + static_cast<int64_t>(p.request) * s.summary_stride;
    float* scores =
        s.scores + p.scores0 + (static_cast<int64_t>(u.head) * all_lanes + lane0) * p.stride;
    for (int b0 = u.split.block_begin + warp * kPiece; b0 < end; b0 += kWarps * kPiece) {
      const float4* rows[2];
      for (int n = 0; n < 2; ++n) {
        const int b = min(b0 + block + 8 * n, end - 1);  // beyond the end: read, not written
        rows[n] =
            summaries +
            ((static_cast<int64_t>(table[b / kSummaryBlocks]) * s.heads.num_kv_heads + u.head) *
                 kSummaryBlocks +
             b % kSummaryBlocks) *
                2 * kChunks;
      }
      float sums[kGroups][2][2] = {};  // [lane / 4][block][vector]
#pragma unroll 4
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const float4 x[2] = {__ldg(rows[0] + v * kChunks + c), __ldg(rows[1] + v * kChunks + c)};
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if (4 * g >= lanes) break;
            const float4 f = reinterpret_cast<const float4*>(factors[v][4 * g + first])[c];
#pragma unroll
            for (int n = 0; n < 2; ++n) sums[g][n][v] = dot(f, x[n], sums[g][n][v]);
          }
        }
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        for (int n = 0; n < 2; ++n) {
          const int lane = 4 * g + first, b = b0 + block + 8 * n;
          if (lane >= lanes || b >= end) continue;
          scores[static_cast<int64_t>(lane) * p.stride + b] =
              s.kind == SummaryKind::kHalves ? larger(sums[g][n][0], sums[g][n][1])
                                             : __fadd_rn(sums[g][n][0], sums[g][n][1]);
        }
    }
  }
}

template <int D>
void launch(const Score& s, cudaStream_t stream) {
  score_kernel<D><<<s.num_ctas, kThreads, 0, stream>>>(s);
  check(cudaGetLastError(), "score");
}

}  // namespace

void score_float(const Score& s, cudaStream_t stream) {
  if (s.heads.head_dim == 64) return launch<64>(s, stream);
  if (s.heads.head_dim == 128) return launch<128>(s, stream);
  refuse("score: head_dim", s.heads.head_dim, "64 or 128");
}

}  // namespace oasis::cuda
