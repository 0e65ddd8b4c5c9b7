// Top-K of the scores, and what of it is fetched: the delta selection of docs/design.md, section 5.
//
// Grid: (KV head, predictor), one CTA each. A block's rank is its key, larger for a larger score,
// then the lower block: no two are equal, so no result depends on timing. Sets are bit maps over
// the blocks.
//
// Bytes: 4 a lane and block read from L2. The floor is latency: three passes over the scores, two
// or three digits of the K-th largest rank, and C rounds of choosing. As many CTAs as possible fit
// an SM (five at 2,048 blocks of four lanes), so that a full batch is one wave.
#include "ops/cuda/check.h"
#include "ops/cuda/select_keys.cuh"

namespace oasis::cuda {
namespace {

using namespace selection;

constexpr int kRankBits = 48, kDigitBits = 10, kBins = 1 << kDigitBits;
constexpr int kMostBlocks = 65535;           // a block and a slot share 32 bits of a list's entry
constexpr int64_t kMostBytes = 226 << 10;    // of shared memory, less the static part
constexpr int64_t kStagedBytes = 100 << 10;  // two CTAs an SM; above, scores stay where they are

// Of a CTA without its scores: keys and two bit maps over the blocks, the bins (later two lists of
// the working set), two more lists, and what the lanes add up.
__host__ __device__ int64_t fixed_bytes(int top_k, int max_blocks, int max_lanes) {
  const int64_t most = top_k < max_blocks ? top_k : max_blocks;
  const int64_t lists = 16 * most > 4 * kBins ? 16 * most : 4 * kBins;
  return lists + 8 * most + 4ll * ((max_blocks + 31) / 32 * 34) + 4ll * max_lanes * (2 + kWarps);
}

// By the key, then the lower block first.
__device__ uint64_t rank_of(uint32_t key, int block) {
  return static_cast<uint64_t>(key) << 16 | (0xffff - block);
}

__device__ uint64_t warp_min(uint64_t x) {
  const uint32_t high = static_cast<uint32_t>(x >> 32);
  const uint32_t best = __reduce_min_sync(~0u, high);
  const uint32_t low = __reduce_min_sync(~0u, high == best ? static_cast<uint32_t>(x) : ~0u);
  return static_cast<uint64_t>(best) << 32 | low;
}

// The sum over the warp's threads up to this one.
__device__ int warp_prefix(int x) {
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(~0u, x, i);
    if (static_cast<int>(threadIdx.x % 32) >= i) x += other;
  }
  return x;
}

// Everything that is read at all, at once: the latency of device memory is paid once.
template <bool kStaged>
__device__ void load_all(const Select& s, const Predictor& p, float* from, int lanes, int64_t row,
                         Shared& sh) {
  if constexpr (kStaged) {
    const uint32_t to = shared_address(sh.scores);
    for (int i = threadIdx.x; i < lanes * p.stride / 4; i += kThreads)
      copy_async(to + 16 * i, from + 4 * i);
    commit_copies();
  } else {
    sh.scores = from;
  }
  each(p.slots, [&](int i) {
    sh.slots[i] = s.slot_blocks[row + i];
    sh.steps[i] = s.slot_steps[row + i];
  });
  each(kBins / 4, [&](int i) { reinterpret_cast<int4*>(sh.bins)[i] = {0, 0, 0, 0}; });
  each((p.blocks + 31) / 32, [&](int w) { sh.resident[w] = 0; });
  if constexpr (kStaged) wait_copies<0>();
  __syncthreads();
  each(p.slots, [&](int i) { atomicOr(&sh.resident[sh.slots[i] / 32], 1u << sh.slots[i] % 32); });
  // Scores are read in fours: what lies beyond the last must not count. Its reader hides it.
  const int last = p.blocks / 4;
  if (static_cast<int>(threadIdx.x) == last % kThreads)
    for (int l = 0; l < lanes; ++l)
      for (int i = p.blocks; i % 4; ++i) sh.scores[l * p.stride + i] = -INFINITY;
}

// Counts, of four blocks from `block` on, those whose ranks are the bound's from bit `known` up, by
// the digit at bit `shift`.
__device__ void count_digits(uint4 four, int block, int n, uint64_t bound, int known, int shift,
                             int32_t* bins) {
  const uint32_t keys[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint64_t rank = rank_of(keys[k], block + k);
    if (block + k < n && rank >> known == bound >> known)
      atomicAdd(&bins[~(rank >> shift) & (kBins - 1)], 1);
  }
}

// A bound that just `count` ranks reach, found digit by digit from the top. The first digit is
// counted already.
__device__ uint64_t top_bound(int n, int count, const Shared& sh) {
  static_assert(kBins == 4 * kThreads);  // four bins a thread
  __shared__ int totals[kWarps], found[3];
  const int warp = threadIdx.x / 32;
  uint64_t bound = 0;
  int room = count;  // of those whose ranks begin like the bound, so many are in
  for (int shift = kRankBits - kDigitBits;;) {
    __syncthreads();
    int4* mine = reinterpret_cast<int4*>(sh.bins) + threadIdx.x;
    const int4 v = *mine;
    *mine = {0, 0, 0, 0};
    const int sizes[4] = {v.x, v.y, v.z, v.w};
    const int all = sizes[0] + sizes[1] + sizes[2] + sizes[3];
    int before = warp_prefix(all);
    if (threadIdx.x % 32 == 31) totals[warp] = before;
    before -= all;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) before += w < warp ? totals[w] : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (before < room && room <= before + sizes[k]) {
        found[0] = kBins - 1 - (4 * threadIdx.x + k);
        found[1] = room - before;
        found[2] = sizes[k];
      }
      before += sizes[k];
    }
    __syncthreads();
    bound |= static_cast<uint64_t>(found[0]) << shift;
    room = found[1];
    if (room == found[2]) return bound;
    const int known = shift;
    shift = max(shift - kDigitBits, 0);
    each((n + 3) / 4, [&](int i) {
      count_digits(reinterpret_cast<const uint4*>(sh.keys)[i], 4 * i, n, bound, known, shift,
                   sh.bins);
    });
  }
}

// wanted: the bit map of the blocks whose ranks reach the bound.
__device__ void mark_wanted(int n, uint64_t bound, const Shared& sh) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int w = threadIdx.x / 32; w < (n + 31) / 32; w += kWarps) {
    const int i = w * 32 + lane;
    const uint32_t in = __ballot_sync(~0u, i < n && rank_of(sh.keys[i], i) >= bound);
    if (lane == 0) sh.wanted[w] = in;
  }
  __syncthreads();
}

// A first selection: the wanted blocks in ascending order, by one warp.
__device__ void list_wanted(int n, int count, int top_k, const Shared& sh, int32_t* to) {
  const int words = (n + 31) / 32, lane = threadIdx.x;
  int at = 0;
  for (int w0 = 0; w0 < words; w0 += 32) {
    uint32_t bits = w0 + lane < words ? sh.wanted[w0 + lane] : 0;
    const int end = at + warp_prefix(__popc(bits));
    for (int i = end - __popc(bits); bits; bits &= bits - 1)
      to[i++] = (w0 + lane) * 32 + __ffs(bits) - 1;
    at = __shfl_sync(~0u, end, 31);
  }
#pragma unroll 1
  for (int i = count + lane; i < top_k; i += 32) to[i] = -1;
}

// Touches what is resident and wanted, lists what may go and what is missing; counts: how many of
// each. An entry's low bits say which it is.
__device__ void compare(const Predictor& p, int32_t* steps, int32_t step, const int32_t* units,
                        int unit_step, const Shared& sh, int* counts) {
  each(p.slots, [&](int i) {
    const int block = sh.slots[i];
    if (sh.wanted[block / 32] >> block % 32 & 1)
      steps[i] = step;
    else  // least recently selected first, then the lower block; the slot rides along
      sh.victims[atomicAdd(&counts[0], 1)] =
          static_cast<uint64_t>(static_cast<uint32_t>(sh.steps[i])) << 32 |
          static_cast<uint32_t>(block) << 16 | i;
  });
  // From the last thread down: the first have slots.
  for (int w = kThreads - 1 - threadIdx.x; w < (p.blocks + 31) / 32; w += kThreads) {
    uint32_t left = sh.wanted[w] & ~sh.resident[w];
    int at = left ? atomicAdd(&counts[1], __popc(left)) : 0;
    for (; left; left &= left - 1) {
      const int block = w * 32 + __ffs(left) - 1;
      sh.missing[at++] = ~rank_of(sh.keys[block], block);  // the highest rank first
      asm volatile(
          "prefetch.global.L2 [%0];" ::"l"(units + static_cast<int64_t>(block) * unit_step));
    }
  }
  __syncthreads();
}

// The low 16 bits of the `take` smallest of list[n], in order. One warp; values are distinct.
__device__ void take_smallest(const uint64_t* list, int n, int take, uint16_t* to) {
  uint64_t from = 0;
  for (int k = 0; k < take; ++k) {
    uint64_t best = ~0ull;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < n; i += 32) {
      const uint64_t x = list[i];
      best = x >= from && x < best ? x : best;
    }
    best = warp_min(best);
    if (threadIdx.x % 32 == 0) to[k] = static_cast<uint16_t>(best);
    from = best + 1;
  }
}

template <bool kStaged, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, 5) select_kernel(Select s) {
  extern __shared__ __align__(16) char memory[];
  __shared__ int counts[3];
  if (static_cast<int>(blockIdx.y) >= *s.num_predictors) return;
  const Predictor p = s.predictors[blockIdx.y];
  const int32_t step = static_cast<int32_t>(*s.step);
  const int head = blockIdx.x, lanes = p.staged_rows * s.heads.group,
            words = (s.max_blocks + 31) / 32, most = min(s.top_k, s.max_blocks);
  Shared sh;
  sh.scores = reinterpret_cast<float*>(memory);
  sh.keys = reinterpret_cast<uint32_t*>(memory);
  sh.bins = reinterpret_cast<int32_t*>(sh.keys + (kStaged ? s.max_lanes : 1) * words * 32);
  sh.missing = reinterpret_cast<uint64_t*>(sh.bins);
  sh.victims = sh.missing + most;
  sh.slots = reinterpret_cast<int32_t*>(sh.bins + max(4 * most, kBins));
  sh.steps = sh.slots + most;
  sh.wanted = reinterpret_cast<uint32_t*>(sh.steps + most);
  sh.resident = sh.wanted + words;
  sh.terms = reinterpret_cast<float*>(sh.resident + words);
  if (threadIdx.x < 3) counts[threadIdx.x] = 0;

  const int64_t row = (static_cast<int64_t>(p.request) * s.heads.num_kv_heads + head) * s.top_k;
  load_all<kStaged>(s, p, s.scores + p.scores0 + static_cast<int64_t>(head) * lanes * p.stride,
                    lanes, row, sh);
  if constexpr (kSoftmax) lane_terms<kStaged>(s, p, lanes, sh);
  each((p.blocks + 3) / 4, [&](int i) {
    const uint4 keys = combined_keys<kStaged, kSoftmax>(s, p, 4 * i, sh);
    reinterpret_cast<uint4*>(sh.keys)[i] = keys;  // over scores that nobody else reads
    count_digits(keys, 4 * i, p.blocks, 0, kRankBits, kRankBits - kDigitBits, sh.bins);
  });
  const int count = min(s.top_k, p.blocks);
  if (count > 0) mark_wanted(p.blocks, top_bound(p.blocks, count, sh), sh);
  if (p.slots == 0) {
    if (threadIdx.x < 32) list_wanted(p.blocks, count, s.top_k, sh, s.first_choice + row);
    return;
  }

  int32_t *blocks = s.slot_blocks + row, *steps = s.slot_steps + row;
  const int32_t* units = s.host_units + p.request * s.host_stride + s.host_offset;
  compare(p, steps, step, units, s.host_step, sh, counts);
  const int missing = counts[1], admitted = min(min(missing, s.fetch_cap), counts[0]);
  uint16_t *coming = reinterpret_cast<uint16_t*>(sh.keys),  // blocks; the keys have done their work
      *leaving = coming + p.blocks;                         // slots
  if (threadIdx.x < 32) {
    take_smallest(sh.missing, missing, admitted, coming);
  } else if (threadIdx.x < 64) {
    take_smallest(sh.victims, counts[0], admitted, leaving);
  } else if (threadIdx.x == 64) {
    counts[2] = atomicAdd(s.num_copies, admitted);
    auto* stats = reinterpret_cast<unsigned long long*>(s.stats) + 4ll * p.request;
    const int more[] = {count, admitted, missing - admitted};
    for (int i = 0; i < 3; ++i) atomicAdd(stats + i, static_cast<unsigned long long>(more[i]));
  }
  __syncthreads();
  const int unit_bytes = 2 * kBlockTokens * s.heads.head_dim * s.element_bytes;
  each(admitted, [&](int k) {
    const int block = coming[k], slot = leaving[k];
    const int64_t unit = units[static_cast<int64_t>(block) * s.host_step],
                  page = s.slot_pages[static_cast<int64_t>(p.request) * s.slot_stride + slot];
    blocks[slot] = block;
    steps[slot] = step;
    s.copies[counts[2] + k] = {
        static_cast<const char*>(s.host_base) + (unit * s.heads.num_kv_heads + head) * unit_bytes,
        static_cast<char*>(s.pool) + (page * s.heads.num_kv_heads + head) * unit_bytes};
  });
}

template <bool kStaged, bool kSoftmax>
void launch(const Select& s, int64_t bytes, cudaStream_t stream) {
  const auto kernel = select_kernel<kStaged, kSoftmax>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  check(allowed, "select: shared memory");
  kernel<<<dim3(s.heads.num_kv_heads, s.max_predictors), kThreads, bytes, stream>>>(s);
  check(cudaGetLastError(), "select: launch, or shared memory for max_blocks and top_k");
}

}  // namespace

void select(const Select& s, cudaStream_t stream) {
  if (s.max_blocks > kMostBlocks) refuse("select: max_blocks", s.max_blocks, "at most 65535");
  const int64_t fixed = fixed_bytes(s.top_k, s.max_blocks, s.max_lanes);
  // Room for the first lane's is there: the keys'.
  const int64_t scores = 4ll * (s.max_lanes - 1) * ((s.max_blocks + 31) / 32) * 32;
  const bool staged = fixed + scores <= kStagedBytes;
  const auto run = s.combine == GroupCombine::kSoftmaxSum
                       ? (staged ? launch<true, true> : launch<false, true>)
                       : (staged ? launch<true, false> : launch<false, false>);
  run(s, staged ? fixed + scores : fixed, stream);
}

int select_max_blocks(int top_k, int max_lanes) {
  int blocks = kMostBlocks;
  while (blocks > 0 && fixed_bytes(top_k, blocks, max_lanes) > kMostBytes) blocks -= 32;
  return blocks > 0 ? blocks : 0;
}

}  // namespace oasis::cuda
