// Attention of prefill rows over paged KV.
//
// Grid: a CTA a tile of 128 lanes, one CTA an SM. A warp copies K and V, page by page, in steps of
// 128 tokens, kStages of them deep; two warpgroups of consumers take 64 lanes each: scores by
// products out of shared memory, weights from the scores' registers. A step's scores are computed
// while the values of the step before are summed. Only the steps that reach past what a warpgroup's
// first row sees are masked.
//
// Operations: 4 * D for each lane and token that it sees. Floor: those / the tensor cores' rate.
// Bytes: q and out once, K and V of what the tile sees once a tile, mostly from the L2 cache.
#include "ops/cuda/check.h"
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/prefill.h"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kGroupThreads = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kGroupLanes = kPrefillLanes / kConsumers;
// Sums to the 168 that a thread of 384 can have.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kStep = 128, kStages = 3;
constexpr int kPages = kStep / kBlockTokens;  // a step

// Matrices of [row][D] in shared memory: [8 rows][half of D] of atoms.
template <int D>
struct Shared {
  static constexpr int kHalves = D / 64, kRowsBytes = kHalves * kAtomBytes;  // of 8 rows
  static constexpr int kPageBytes = kBlockTokens * D * 2, kTileBytes = kStep * D * 2;
  static constexpr int kQueriesBytes = kPrefillLanes * D * 2;
  static constexpr int kBarriers = kQueriesBytes + kStages * 2 * kTileBytes;
  static constexpr int kBytes = kBarriers + kStages * 4 * 8 + kAtomBytes;  // and to align it
  uint32_t base;

  __device__ uint32_t queries(int consumer) const {
    return base + consumer * (kQueriesBytes / kConsumers);
  }
  __device__ uint32_t keys(int stage) const {
    return base + kQueriesBytes + stage * 2 * kTileBytes;
  }
  __device__ uint32_t values(int stage) const { return keys(stage) + kTileBytes; }
  __device__ uint32_t barrier(int which, int stage) const {
    return base + kBarriers + (which * kStages + stage) * 8;
  }
  __device__ uint32_t keys_full(int stage) const { return barrier(0, stage); }
  __device__ uint32_t values_full(int stage) const { return barrier(1, stage); }
  __device__ uint32_t keys_empty(int stage) const { return barrier(2, stage); }
  __device__ uint32_t values_empty(int stage) const { return barrier(3, stage); }
};

// Which stage a step is in, and the parity of the stage's use.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

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

// Tokens that a lane sees. Lanes past the end stand for the last one.
__device__ int seen_by(const Prefill& p, const Tile& tile, int lane) {
  return tile.segment.visible + (tile.lane_begin + min(lane, tile.lanes - 1)) / p.heads.group;
}

// Where a lane's D elements begin in q and out.
__device__ int64_t offset_of(const Prefill& p, const Tile& tile, int lane) {
  const int i = tile.lane_begin + min(lane, tile.lanes - 1);
  const int row = tile.segment.row0 + i / p.heads.group;
  const int head = tile.kv_head * p.heads.group + i % p.heads.group;
  return (static_cast<int64_t>(row) * p.heads.num_kv_heads * p.heads.group + head) *
         p.heads.head_dim;
}

// One instruction; 0 where the result would be subnormal.
__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ void store_shared(uint32_t to, int4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// ---------------------------------------------------------------- the copying warp

// Lane i of the warp copies page i of each step. Pages that the tile does not see are left out.
template <int D>
__device__ void produce(const Prefill& p, const CUtensorMap* map, const Tile& tile,
                        const Shared<D>& shared, int steps, int lane) {
  const int num_pages = (tile.seen + kBlockTokens - 1) / kBlockTokens;
  const int32_t* list = p.pages + tile.segment.pages0;
  auto id_at = [&](int step) {
    const int page = step * kPages + lane;
    return lane < kPages && page < num_pages ? list[page] : -1;
  };
  int next = id_at(0);
  Place at;
  for (int step = 0; step < steps; ++step, at.advance()) {
    const int id = next;
    next = id_at(step + 1);
    const int bytes = min(kPages, num_pages - step * kPages) * Shared<D>::kPageBytes;
    const int atoms = (id * p.heads.num_kv_heads + tile.kv_head) * 2 * (kBlockTokens / kAtomRows);
    for (int value = 0; value < 2; ++value) {
      const uint32_t full = value ? shared.values_full(at.stage) : shared.keys_full(at.stage);
      const uint32_t to = value ? shared.values(at.stage) : shared.keys(at.stage);
      barrier_wait(value ? shared.values_empty(at.stage) : shared.keys_empty(at.stage),
                   at.parity ^ 1);
      if (lane == 0) barrier_expect(full, bytes);
      __syncwarp();
      if (id >= 0)
        copy_box(to + lane * Shared<D>::kPageBytes, map, full, 0, 0, 0,
                 atoms + value * (kBlockTokens / kAtomRows));
    }
  }
}

// ---------------------------------------------------------------- the consumers

// A thread's part of 64 lanes' scores and sums: of two lanes, a and a + 8.
template <int D>
struct Rows {
  float scores[kStep / 2];          // [8 tokens][lane][2]
  uint32_t weights[kStep / 16][4];  // of the step before, as the product wants them
  float out[D / 2];                 // [8 elements][lane][2]
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

template <class T, int D>
__device__ void issue_scores(Rows<D>& r, uint32_t queries, uint32_t keys) {
  const Matrix left(queries, 16, Shared<D>::kRowsBytes), right(keys, 16, Shared<D>::kRowsBytes);
  hold(r.scores);
  begin_products();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const int at = k / 4 * kAtomBytes + k % 4 * 32;
    WarpgroupProduct<T>::shared_shared(r.scores, left.at(at), right.at(at), k > 0);
  }
  commit_products();
}

template <class T, int D>
__device__ void issue_values(Rows<D>& r, uint32_t values) {
  const Matrix right(values, kAtomBytes, Shared<D>::kRowsBytes);
  hold(r.out);
  hold(r.weights);
  begin_products();
#pragma unroll
  for (int k = 0; k < kStep / 16; ++k)
    WarpgroupProduct<T>::registers_shared(r.out, r.weights[k], right.at(k * Shared<D>::kPageBytes));
  commit_products();
}

// token: of the thread's first score; seen: tokens that its two lanes see.
template <int D>
__device__ void mask(Rows<D>& r, int token, const int (&seen)[2]) {
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i)
    if (token + i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) r.scores[i] = -INFINITY;
}

// Scores into weights, in place; correction: of the sums before.
template <int D>
__device__ void softmax_step(Rows<D>& r, float scale, float (&correction)[2]) {
#pragma unroll
  for (int lane = 0; lane < 2; ++lane) {
    float high = r.top[lane];
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
      high = fmaxf(high, fmaxf(r.scores[n * 4 + lane * 2], r.scores[n * 4 + lane * 2 + 1]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    // Finite: every lane sees the first token, which is in the first step.
    correction[lane] = exp2_fast((r.top[lane] - high) * scale);
    r.top[lane] = high;
    float sum = r.sum[lane] * correction[lane];
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = r.scores[n * 4 + lane * 2 + j];
        x = exp2_fast(fmaf(x, scale, -high * scale));
        sum += x;
      }
    r.sum[lane] = sum;
  }
}

// The sums are rescaled and the weights are made ready to be summed: when the values of the step
// before are done.
template <class T, int D>
__device__ void rescale_and_pack(Rows<D>& r, const float (&correction)[2]) {
  hold(r.out);
  hold(r.weights);
#pragma unroll
  for (int i = 0; i < D / 2; ++i) r.out[i] *= correction[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < kStep / 4; ++i)
    r.weights[i / 4][i % 4] = Element<T>::pack(r.scores[2 * i], r.scores[2 * i + 1]);
}

template <class T, int D>
__device__ void consume(const Prefill& p, const Tile& tile, const Shared<D>& shared, int steps,
                        int consumer, int thread) {
  constexpr int kChunks = D / 8;  // of 16 bytes, a row
  const int lane = thread % 32, first_lane = consumer * kGroupLanes + thread / 32 * 16 + lane / 4;
  const uint32_t queries = shared.queries(consumer);
  const float scale = 1.44269504f / sqrtf(static_cast<float>(D));  // scores in powers of two
  auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };

  for (int i = thread; i < kGroupLanes * kChunks; i += kGroupThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const T* from =
        static_cast<const T*>(p.q) + offset_of(p, tile, consumer * kGroupLanes + row) + chunk * 8;
    store_shared(queries + row / 8 * Shared<D>::kRowsBytes + chunk / 8 * kAtomBytes +
                     row % 8 * kAtomRowBytes + (chunk % 8 ^ row % 8) * 16,
                 *reinterpret_cast<const int4*>(from));
  }
  fence_shared();
  sync_threads(1 + consumer, kGroupThreads);

  const int seen[2] = {seen_by(p, tile, first_lane), seen_by(p, tile, first_lane + 8)};
  const int unmasked = seen_by(p, tile, consumer * kGroupLanes);  // tokens that all its lanes see
  Rows<D> r;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) r.out[i] = 0.0f;
  float correction[2];

  Place keys, values;
  barrier_wait(shared.keys_full(keys.stage), keys.parity);
  issue_scores<T, D>(r, queries, shared.keys(keys.stage));
  wait_products<0>();
  hold(r.scores);
  release(shared.keys_empty(keys.stage));
  if (kStep > unmasked) mask(r, lane % 4 * 2, seen);
  softmax_step(r, scale, correction);

  for (int step = 1; step < steps; ++step) {
    // Here, where the loop begins, rather than where it ends: the assembler moves a wait up within
    // a basic block, and so before the softmax that is to run meanwhile.
    wait_products<0>();
    if (step > 1) {
      release(shared.values_empty(values.stage));
      values.advance();
    }
    rescale_and_pack<T, D>(r, correction);
    keys.advance();
    barrier_wait(shared.keys_full(keys.stage), keys.parity);
    issue_scores<T, D>(r, queries, shared.keys(keys.stage));
    barrier_wait(shared.values_full(values.stage), values.parity);
    issue_values<T, D>(r, shared.values(values.stage));
    wait_products<1>();
    hold(r.scores);
    release(shared.keys_empty(keys.stage));
    if ((step + 1) * kStep > unmasked) mask(r, step * kStep + lane % 4 * 2, seen);
    softmax_step(r, scale, correction);
  }
  wait_products<0>();
  if (steps > 1) values.advance();
  rescale_and_pack<T, D>(r, correction);

  barrier_wait(shared.values_full(values.stage), values.parity);
  // What no lane sees is zeroed in place, also where no page was copied: a weight of 0 alone would
  // let a NaN through.
  const int known = tile.seen - (steps - 1) * kStep;
  if (known < kStep) {
    for (int i = consumer * kGroupThreads + thread; i < (kStep - known) * kChunks;
         i += kConsumers * kGroupThreads) {
      const int row = known + i / kChunks, chunk = i % kChunks;
      store_shared(shared.values(values.stage) + row / 8 * Shared<D>::kRowsBytes +
                       chunk / 8 * kAtomBytes + row % 8 * kAtomRowBytes + chunk % 8 * 16,
                   int4{});
    }
    fence_shared();
    sync_threads(1 + kConsumers, kConsumers * kGroupThreads);
  }
  issue_values<T, D>(r, shared.values(values.stage));
  wait_products<0>();
  hold(r.out);

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.sum[i] += __shfl_xor_sync(~0u, r.sum[i], 1);
    r.sum[i] += __shfl_xor_sync(~0u, r.sum[i], 2);
    if (first_lane + 8 * i >= tile.lanes) continue;
    const float inverse = 1.0f / r.sum[i];
    T* to = static_cast<T*>(p.out) + offset_of(p, tile, first_lane + 8 * i) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + n * 8) =
          Element<T>::pack(r.out[n * 4 + i * 2] * inverse, r.out[n * 4 + i * 2 + 1] * inverse);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const Prefill p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ char raw[];
  const Shared<D> shared{(shared_address(raw) + kAtomBytes - 1) / kAtomBytes * kAtomBytes};
  const int group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);  // known to be uniform
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.keys_full(stage), 1);
      barrier_init(shared.values_full(stage), 1);
      barrier_init(shared.keys_empty(stage), kConsumers * kGroupThreads / 32);  // a warp each
      barrier_init(shared.values_empty(stage), kConsumers * kGroupThreads / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  const Tile tile = tile_at(p, blockIdx.x);
  const int steps = (tile.seen + kStep - 1) / kStep;
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce<D>(p, &map, tile, shared, steps, threadIdx.x);
  } else {
    take_registers<kConsumerRegisters>();
    consume<T, D>(p, tile, shared, steps, group - 1, threadIdx.x % kGroupThreads);
  }
}

template <class T, int D>
void launch(const Prefill& p, cudaStream_t stream) {
  constexpr int kBytes = Shared<D>::kBytes;
  static const cudaError_t allowed = cudaFuncSetAttribute(
      prefill_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(allowed, "prefill: shared memory");
  prefill_kernel<T, D>
      <<<p.num_tiles, kThreads, kBytes, stream>>>(p, page_map(p.pool, p.num_pages, p.heads));
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
