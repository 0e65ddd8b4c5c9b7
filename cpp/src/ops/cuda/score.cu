// Scores of all complete blocks for the queries that predict, in 16 bit; score_float.cu is the
// other one.
//
// Grid: num_ctas, each looping over the units (split, KV head, lane tile). Four warps; each takes
// kPiece blocks at a time and keeps kStages of such pieces in flight by itself, across the ends of
// units. A score is one product of [f(q), g(q)] with a block's two vectors: mean_std q.mean +
// |q|.std, minmax q+.max + q-.min, halves the larger of q.first and q.second.
//
// Bytes: each summary once a lane tile (4 D bytes in 16 bit) plus 4 bytes a lane and block written.
// Floor: those bytes / memory bandwidth.
#include "ops/cuda/check.h"
#include "ops/cuda/float.h"
#include "ops/cuda/types.cuh"
#include "ops/cuda/units.cuh"

namespace oasis::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kPiece = 8;

constexpr int stages_for(int head_dim) { return head_dim == 64 ? 8 : 4; }
constexpr int piece_elements(int head_dim) { return 2 * kPiece * head_dim; }

struct Cursor {
  int unit, block, end;
  const int32_t* table;  // the request's summary pages
  const char* head;      // the unit's head in page 0
  int id;                // of the block's page, read one step ahead of its use
};

template <class T, int D>
__device__ void find_next(const Score& s, Cursor& c, int units, int warp) {
  while (c.block >= c.end) {
    c.unit += gridDim.x;
    if (c.unit >= units) return;
    const ScoreUnit u = unit_at(s, c.unit);
    if (idle(s, u)) continue;
    c.block = u.split.block_begin + warp * kPiece;
    c.end = u.split.block_end;
    c.table = s.summary_pages + static_cast<int64_t>(u.predictor.request) * s.summary_stride;
    c.head = static_cast<const char*>(s.summaries) +
             static_cast<int64_t>(u.head) * kSummaryBlocks * 2 * D * sizeof(T);
  }
  c.id = c.table[c.block / kSummaryBlocks];
}

// copy_async of what only this unit and its other lane tiles, which run beside it, read in a step:
// it leaves the L2 cache before all else.
__device__ void copy_once(uint32_t to, const void* from) {
  uint64_t evict_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(evict_first));
}

// Row 2 b + v of a piece is vector v of its block b; its 16-byte chunk c lies at c ^ b.
template <class T, int D>
__device__ void load_piece(const Score& s, const Cursor& c, int units, uint32_t stage, int lane) {
  if (c.unit < units) {
    const char* from =
        c.head + (static_cast<int64_t>(c.id) * s.heads.num_kv_heads * kSummaryBlocks +
                  c.block % kSummaryBlocks) *
                     2 * D * sizeof(T);
    constexpr int kChunks = D * sizeof(T) / 16;
    const int rows = 2 * min(kPiece, c.end - c.block);
#pragma unroll
    for (int i = lane; i < 2 * kPiece * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (row < rows) copy_once(stage + (row * kChunks + (chunk ^ row / 2)) * 16, from + i * 16);
    }
  }
  commit_copies();
}

// What multiplies a block's first (half 0) or second vector, from two elements of the query.
template <class T, SummaryKind kKind>
__device__ uint32_t factor(uint32_t q, int half) {
  if (kKind == SummaryKind::kHalves || (kKind == SummaryKind::kMeanStd && half == 0)) return q;
  if (kKind == SummaryKind::kMeanStd) return q & 0x7fff7fff;
  const T* x = reinterpret_cast<const T*>(&q);
  return Element<T>::pack(score_factor(Element<T>::to_float(x[0]), kKind, half),
                          score_factor(Element<T>::to_float(x[1]), kKind, half));
}

template <class T, int D, SummaryKind kKind>
__global__ void __launch_bounds__(kThreads, 3) score_kernel(Score s) {
  constexpr int kStages = stages_for(D), kSteps = D / 16, kChunks = D * sizeof(T) / 16;
  constexpr int kStageBytes = piece_elements(D) * sizeof(T);
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stage0 = shared_address(shared) + warp * kStages * kStageBytes;
  const int units = *s.num_splits * s.heads.num_kv_heads * s.max_lane_tiles;
  const int hq = s.heads.num_kv_heads * s.heads.group;
  constexpr bool kHalves = kKind == SummaryKind::kHalves;

  Cursor load{
      static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), 0, 0, nullptr, nullptr, 0};
  find_next<T, D>(s, load, units, warp);
  for (int i = 0; i < kStages; ++i) {
    load_piece<T, D>(s, load, units, stage0 + i * kStageBytes, lane);
    load.block += kWarps * kPiece;
    find_next<T, D>(s, load, units, warp);
  }
  int stage = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const ScoreUnit u = unit_at(s, unit);
    if (idle(s, u)) continue;
    const int all_lanes = u.predictor.staged_rows * s.heads.group;
    const int lanes = min(kLaneTile, all_lanes - u.tile * kLaneTile);
    const T* rows[2];
    for (int i = 0; i < 2; ++i) {
      const int l = u.tile * kLaneTile + min(lane / 4 + 8 * i, lanes - 1);
      const int row = u.predictor.staged0 + l / s.heads.group,
                head = u.head * s.heads.group + l % s.heads.group;
      rows[i] = static_cast<const T*>(s.staged) + (static_cast<int64_t>(row) * hq + head) * D;
    }
    uint32_t q[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        q[k][i] =
            *reinterpret_cast<const uint32_t*>(rows[i % 2] + k * 16 + i / 2 * 8 + lane % 4 * 2);
    float* scores =
        s.scores + u.predictor.scores0 +
        (static_cast<int64_t>(u.head) * all_lanes + u.tile * kLaneTile) * u.predictor.stride;

    for (int block = u.split.block_begin + warp * kPiece; block < u.split.block_end;
         block += kWarps * kPiece) {
      wait_copies<kStages - 1>();
      __syncwarp();
      const uint32_t piece = stage0 + stage * kStageBytes;
      float d[2][4] = {};  // [which vector, kept apart for halves]
      const int b_row = lane % 8;
#pragma unroll
      for (int k = 0; k < kSteps; k += 2)
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          uint32_t b[4];
          ldmatrix(b, piece + ((2 * b_row + v) * kChunks + ((k * 2 + lane / 8) ^ b_row)) * 16);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = factor<T, kKind>(q[k + h][i], v);
            if (kHalves && v == 1)
              Element<T>::mma(d[1], a, b[2 * h], b[2 * h + 1]);
            else
              Element<T>::mma(d[0], a, b[2 * h], b[2 * h + 1]);
          }
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int l = lane / 4 + 8 * i, b = block + lane % 4 * 2;
        if (l >= lanes) continue;
        float x = d[0][2 * i], y = d[0][2 * i + 1];
        if (kHalves) {
          x = larger(x, d[1][2 * i]);
          y = larger(y, d[1][2 * i + 1]);
        }
        float* to = scores + static_cast<int64_t>(l) * u.predictor.stride + b;
        if (b + 1 < u.split.block_end)
          *reinterpret_cast<float2*>(to) = {x, y};
        else if (b < u.split.block_end)
          *to = x;
      }
      __syncwarp();
      load_piece<T, D>(s, load, units, stage0 + stage * kStageBytes, lane);
      load.block += kWarps * kPiece;
      find_next<T, D>(s, load, units, warp);
      stage = (stage + 1) % kStages;
    }
  }
}

template <class T, int D, SummaryKind kKind>
void launch(const Score& s, cudaStream_t stream) {
  constexpr int kBytes = kWarps * stages_for(D) * piece_elements(D) * static_cast<int>(sizeof(T));
  static const cudaError_t allowed = cudaFuncSetAttribute(
      score_kernel<T, D, kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(allowed, "score: shared memory");
  score_kernel<T, D, kKind><<<s.num_ctas, kThreads, kBytes, stream>>>(s);
  check(cudaGetLastError(), "score");
}

template <class T, int D>
void launch(const Score& s, cudaStream_t stream) {
  if (s.kind == SummaryKind::kMeanStd) return launch<T, D, SummaryKind::kMeanStd>(s, stream);
  if (s.kind == SummaryKind::kMinMax) return launch<T, D, SummaryKind::kMinMax>(s, stream);
  return launch<T, D, SummaryKind::kHalves>(s, stream);
}

template <class T>
void launch(const Score& s, cudaStream_t stream) {
  if (s.heads.head_dim == 64) return launch<T, 64>(s, stream);
  if (s.heads.head_dim == 128) return launch<T, 128>(s, stream);
  refuse("score: head_dim", s.heads.head_dim, "64 or 128");
}

}  // namespace

int score_ctas_per_sm() { return 3; }

void score(const Score& s, cudaStream_t stream) {
  if (s.dtype == DType::kBFloat16) return launch<BFloat16>(s, stream);
  if (s.dtype == DType::kFloat16) return launch<Half>(s, stream);
  score_float(s, stream);
}

}  // namespace oasis::cuda
