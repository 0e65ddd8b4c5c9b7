// Top-K of the scores, and what of it is fetched: the delta selection of docs/design.md, section 5.
//
// Grid: (KV head, predictor), one CTA each. Keys lie in shared memory, ordered so that the larger
// wins; ties go to the lower block. Sets are bit maps over the blocks. Everything is a total order:
// no result depends on timing.
//
// Bytes: 4 a lane and block read from L2. The floor is latency: three passes over the scores, four
// histograms for the four bytes of the K-th largest key, and C rounds of choosing.
#include "ops/cuda/check.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kStagedBytes = 100
                                 << 10;  // two CTAs an SM; above, the scores stay where they are

constexpr int kMostBlocks = 65535;         // a block and a slot share 32 bits of a list's entry
constexpr int64_t kMostBytes = 224 << 10;  // of shared memory, less the static part

// Of a CTA without its scores: keys and two bit maps over the blocks, four lists of the working
// set, and what the lanes add up.
__host__ __device__ int64_t fixed_bytes(int top_k, int max_blocks, int max_lanes) {
  return 24ll * (top_k < max_blocks ? top_k : max_blocks) + 4ll * ((max_blocks + 31) / 32 * 34) +
         4ll * max_lanes * (2 + kWarps);
}

// Larger float, larger key; NaN below all. Sinks above all.
__device__ uint32_t key_of(float x) { return x != x ? 0 : ordered_bits(x); }

__device__ float warp_max(float x) {
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
__device__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// The smaller of two (value, index) pairs across the warp, in every lane.
__device__ void warp_min(uint64_t& value) {
  for (int i = 16; i > 0; i /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, i);
    value = other < value ? other : value;
  }
}

struct Shared {
  uint32_t *keys, *wanted, *resident;  // keys [blocks]; bit maps [blocks / 32]
  uint64_t *missing, *victims;         // [top_k], what is left to choose from, smallest first
  int32_t *slots, *steps;  // [top_k], the block in each slot and when it was last selected
  float* terms;            // softmax_sum: [lane] maxima, [lane] sums, [warp][lane] parts
  float* scores;           // [lane][stride]: here if they fit, else where they came from
};

// Everything that is read at all, at once: the latency of device memory is paid once.
template <bool kStaged>
__device__ void load_all(const Select& s, const Predictor& p, float* from, int lanes, int64_t row,
                         Shared& sh) {
  if constexpr (kStaged) {
    const float4* x = reinterpret_cast<const float4*>(from);
    float4* to = reinterpret_cast<float4*>(sh.scores);
#pragma unroll 8
    for (int i = threadIdx.x; i < lanes * p.stride / 4; i += kThreads) to[i] = x[i];
  } else {
    sh.scores = from;
  }
  for (int i = threadIdx.x; i < p.slots; i += kThreads) {
    sh.slots[i] = s.slot_blocks[row + i];
    sh.steps[i] = s.slot_steps[row + i];
  }
  __syncthreads();
}

// The terms of softmax_sum: each lane's maximum, and its powers in place of its scores with the
// inverse of their sum. In a fixed order.
template <bool kStaged>
__device__ void lane_terms(const Select& s, const Predictor& p, int lanes, const Shared& sh) {
  const float scale = 1.44269504f * rsqrtf(static_cast<float>(s.heads.head_dim));  // powers of two
  float *tops = sh.terms, *sums = tops + s.max_lanes, *parts = sums + s.max_lanes;
  const int warp = threadIdx.x / 32;
  for (int pass = 0; pass < 2; ++pass) {
    for (int l = 0; l < lanes; ++l) {
      float4* x = reinterpret_cast<float4*>(sh.scores + l * p.stride);
      float mine = pass == 0 ? -INFINITY : 0.0f;
      const float top = pass == 0 ? 0.0f : tops[l];
      for (int i = threadIdx.x; 4 * i < p.blocks; i += kThreads) {
        float4 v = x[i];
        float* e = reinterpret_cast<float*>(&v);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const bool known = 4 * i + k < p.blocks;
          if (pass == 0) {
            mine = known ? fmaxf(mine, e[k] * scale) : mine;
          } else {
            e[k] = exp2f(e[k] * scale - top);
            mine += known ? e[k] : 0.0f;
          }
        }
        if (kStaged && pass == 1) x[i] = v;
      }
      mine = pass == 0 ? warp_max(mine) : warp_sum(mine);
      if (threadIdx.x % 32 == 0) parts[warp * s.max_lanes + l] = mine;
    }
    __syncthreads();
    for (int l = threadIdx.x; l < lanes; l += kThreads) {
      float all = parts[l];
      for (int w = 1; w < kWarps; ++w) {
        const float other = parts[w * s.max_lanes + l];
        all = pass == 0 ? fmaxf(all, other) : all + other;
      }
      (pass == 0 ? tops : sums)[l] = pass == 0 ? all : 1.0f / all;
    }
    __syncthreads();
  }
}

// The keys of four blocks from `block` on.
template <bool kStaged>
__device__ uint4 combined_keys(const Select& s, const Predictor& p, int block, const Shared& sh) {
  const float scale = 1.44269504f * rsqrtf(static_cast<float>(s.heads.head_dim));
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  int l = 0;
  for (int r = 0; r < p.staged_rows; ++r) {
    const float start = s.combine == GroupCombine::kMax ? -INFINITY : 0.0f;
    float group[4] = {start, start, start, start};
    for (int g = 0; g < s.heads.group; ++g, ++l) {
      const float4 v = *reinterpret_cast<const float4*>(sh.scores + l * p.stride + block);
      const float x[4] = {v.x, v.y, v.z, v.w};
      if (s.combine == GroupCombine::kSoftmaxSum) {
        const float top = kStaged ? 0.0f : sh.terms[l], inverse = sh.terms[s.max_lanes + l];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          group[k] += (kStaged ? x[k] : exp2f(x[k] * scale - top)) * inverse;
      } else if (s.combine == GroupCombine::kSum) {
#pragma unroll
        for (int k = 0; k < 4; ++k) group[k] += x[k];
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          group[k] = group[k] > x[k] || group[k] != group[k] ? group[k] : x[k];
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      best[k] = best[k] > group[k] || best[k] != best[k] ? best[k] : group[k];
  }
  uint32_t keys[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    keys[k] = block + k >= p.blocks ? 0 : block + k < s.sink_blocks ? ~0u : key_of(best[k]);
  return {keys[0], keys[1], keys[2], keys[3]};
}

// wanted: the bit map of the top `count` blocks. Byte by byte from the top: how many keys with the
// bytes so far have each next byte.
__device__ void top_blocks(int n, int count, const Shared& sh, uint32_t* bins) {
  __shared__ uint32_t totals[kWarps], found[2];
  static_assert(kThreads == 256);  // a bin a thread
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  uint32_t bound = 0, room = count;  // at least `count` keys reach the bound; of those with its
                                     // bytes so far, `room` are in
  bool exact = false;                // just as many reach it
  for (int shift = 24; shift >= 0 && !exact; shift -= 8) {
    bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; 4 * i < n; i += kThreads) {
      const uint4 v = reinterpret_cast<const uint4*>(sh.keys)[i];
      const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (4 * i + k < n && (shift == 24 || keys[k] >> (shift + 8) == bound >> (shift + 8)))
          atomicAdd(&bins[255 - (keys[k] >> shift & 255)], 1);  // the largest byte first
    }
    __syncthreads();
    const uint32_t mine = bins[threadIdx.x];
    uint32_t reach = mine;
    for (int i = 1; i < 32; i *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, reach, i);
      if (in_warp >= i) reach += other;
    }
    if (in_warp == 31) totals[warp] = reach;
    __syncthreads();
    for (int w = 0; w < warp; ++w) reach += totals[w];
    if (reach >= room && reach - mine < room) {
      found[0] = 255 - threadIdx.x;
      found[1] = room - (reach - mine) | (reach == room ? 1u << 31 : 0);
    }
    __syncthreads();
    bound |= found[0] << shift;
    room = found[1] & 0x7fffffff;
    exact = found[1] >> 31;
  }
  if (exact && bound > 0) --bound;  // so that all that reach it are above
  // Above the bound all are in; at it, the lowest blocks as long as there is room. One warp hands
  // out what is left.
  const int words = (n + 31) / 32, lane = threadIdx.x % 32;
  for (int w = threadIdx.x / 32; w < words; w += kWarps) {
    const int i = w * 32 + lane;
    const uint32_t key = i < n ? sh.keys[i] : 0;
    const uint32_t above = __ballot_sync(~0u, i < n && key > bound),
                   at = __ballot_sync(~0u, i < n && key == bound);
    if (lane == 0) {
      sh.wanted[w] = above;
      sh.resident[w] = at;  // borrowed
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int above = 0;
    for (int w = lane; w < words; w += 32) above += __popc(sh.wanted[w]);
    int left = count - static_cast<int>(__reduce_add_sync(~0u, above));
    for (int w0 = 0; w0 < words; w0 += 32) {
      const int w = w0 + lane;
      uint32_t at = w < words ? sh.resident[w] : 0;
      int before = __popc(at);
      for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, before, i);
        if (lane >= i) before += other;
      }
      const int total = __shfl_sync(~0u, before, 31);
      before -= __popc(at);
      const int take = min(max(left - before, 0), __popc(at));
      uint32_t taken = 0;
      for (int i = 0; i < take; ++i) {
        taken |= at & -at;
        at &= at - 1;
      }
      if (w < words) sh.wanted[w] |= taken;
      left -= total;
    }
  }
  __syncthreads();
}

__device__ bool has(const uint32_t* bits, int i) { return bits[i / 32] >> (i % 32) & 1; }

// Marks what is resident, touches what is both, lists what may go and what is missing; how many are
// missing.
__device__ int compare(const Predictor& p, int32_t* steps, int32_t step, const Shared& sh,
                       int* counts) {
  for (int w = threadIdx.x; w < (p.blocks + 31) / 32; w += kThreads) sh.resident[w] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.slots; i += kThreads) {
    const int block = sh.slots[i];
    atomicOr(&sh.resident[block / 32], 1u << block % 32);
    if (has(sh.wanted, block))
      steps[i] = step;
    else  // least recently selected first, then the lower block; the slot rides along
      sh.victims[atomicAdd(&counts[0], 1)] =
          static_cast<uint64_t>(static_cast<uint32_t>(sh.steps[i])) << 32 |
          static_cast<uint32_t>(block);
  }
  __syncthreads();
  for (int w = threadIdx.x; w < (p.blocks + 31) / 32; w += kThreads)
    for (uint32_t left = sh.wanted[w] & ~sh.resident[w]; left; left &= left - 1) {
      const int block = w * 32 + __ffs(left) - 1;  // larger key first, then the lower block
      sh.missing[atomicAdd(&counts[1], 1)] =
          static_cast<uint64_t>(~sh.keys[block]) << 32 | static_cast<uint32_t>(block);
    }
  __syncthreads();
  return counts[1];
}

// Moves the `take` smallest of list[n] to its front, in order. One warp; values are distinct.
__device__ void order_front(uint64_t* list, int n, int take) {
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < take; ++k) {
    uint64_t best = ~0ull;
    for (int i = k + lane; i < n; i += 32) best = list[i] < best ? list[i] : best;
    warp_min(best);
    for (int i = k + lane; i < n; i += 32)
      if (list[i] == best) list[i] = list[k];
    __syncwarp();
    if (lane == 0) list[k] = best;
    __syncwarp();
  }
}

template <bool kStaged>
__global__ void __launch_bounds__(kThreads, 4) select_kernel(Select s) {
  extern __shared__ __align__(16) char memory[];
  __shared__ uint32_t bins[256];
  __shared__ int counts[3];
  if (static_cast<int>(blockIdx.y) >= *s.num_predictors) return;
  const Predictor p = s.predictors[blockIdx.y];
  const int head = blockIdx.x, lanes = p.staged_rows * s.heads.group,
            max_words = (s.max_blocks + 31) / 32;
  Shared sh;
  sh.scores = reinterpret_cast<float*>(memory);
  sh.keys =
      reinterpret_cast<uint32_t*>(memory + (kStaged ? 4ll * s.max_lanes * max_words * 32 : 0));
  sh.missing = reinterpret_cast<uint64_t*>(sh.keys + max_words * 32);
  const int most = min(s.top_k, s.max_blocks);
  sh.victims = sh.missing + most;
  sh.wanted = reinterpret_cast<uint32_t*>(sh.victims + most);
  sh.resident = sh.wanted + max_words;
  sh.slots = reinterpret_cast<int32_t*>(sh.resident + max_words);
  sh.steps = sh.slots + most;
  sh.terms = reinterpret_cast<float*>(sh.steps + most);
  if (threadIdx.x < 3) counts[threadIdx.x] = 0;

  const int64_t row = (static_cast<int64_t>(p.request) * s.heads.num_kv_heads + head) * s.top_k;
  load_all<kStaged>(s, p, s.scores + p.scores0 + static_cast<int64_t>(head) * lanes * p.stride,
                    lanes, row, sh);
  if (s.combine == GroupCombine::kSoftmaxSum) lane_terms<kStaged>(s, p, lanes, sh);
  for (int i = threadIdx.x; 4 * i < p.blocks; i += kThreads)
    reinterpret_cast<uint4*>(sh.keys)[i] = combined_keys<kStaged>(s, p, 4 * i, sh);
  __syncthreads();
  const int count = min(s.top_k, p.blocks);
  top_blocks(p.blocks, count, sh, bins);

  if (p.slots == 0) {  // a first selection: listed in ascending order
    if (threadIdx.x < 32) {
      int at = 0;
      for (int w0 = 0; w0 < (p.blocks + 31) / 32; w0 += 32) {
        const int w = w0 + threadIdx.x;
        uint32_t bits = w < (p.blocks + 31) / 32 ? sh.wanted[w] : 0;
        int before = __popc(bits);
        for (int i = 1; i < 32; i *= 2) {
          const int other = __shfl_up_sync(~0u, before, i);
          if (static_cast<int>(threadIdx.x) >= i) before += other;
        }
        const int total = __shfl_sync(~0u, before, 31);
        int to = at + before - __popc(bits);
        for (; bits; bits &= bits - 1) s.first_choice[row + to++] = w * 32 + __ffs(bits) - 1;
        at += total;
      }
      for (int i = count + threadIdx.x; i < s.top_k; i += 32) s.first_choice[row + i] = -1;
    }
    return;
  }

  int32_t *blocks = s.slot_blocks + row, *steps = s.slot_steps + row;
  const int32_t step = static_cast<int32_t>(*s.step);
  const int missing = compare(p, steps, step, sh, counts);
  const int admitted = min(min(missing, s.fetch_cap), counts[0]);
  if (threadIdx.x < 32)
    order_front(sh.missing, missing, admitted);
  else if (threadIdx.x < 64)
    order_front(sh.victims, counts[0], admitted);
  __syncthreads();
  if (threadIdx.x == 0) counts[2] = atomicAdd(s.num_copies, admitted);
  __syncthreads();
  const int unit_bytes = 2 * kBlockTokens * s.heads.head_dim * s.element_bytes;
  for (int k = threadIdx.x / 32; k < admitted; k += kWarps) {
    const int block = static_cast<int>(static_cast<uint32_t>(sh.missing[k])),
              old = static_cast<int>(static_cast<uint32_t>(sh.victims[k]));
    for (int i = threadIdx.x % 32; i < p.slots; i += 32) {
      if (sh.slots[i] != old) continue;
      blocks[i] = block;
      steps[i] = step;
      const int64_t unit = s.host_units[p.request * s.host_stride +
                                        static_cast<int64_t>(block) * s.host_step + s.host_offset];
      const int64_t page = s.slot_pages[static_cast<int64_t>(p.request) * s.slot_stride + i];
      s.copies[counts[2] + k] = {
          static_cast<const char*>(s.host_base) + (unit * s.heads.num_kv_heads + head) * unit_bytes,
          static_cast<char*>(s.pool) + (page * s.heads.num_kv_heads + head) * unit_bytes};
    }
  }
  if (threadIdx.x == 0) {
    auto add = [&](int i, int64_t n) {
      atomicAdd(
          reinterpret_cast<unsigned long long*>(s.stats + static_cast<int64_t>(p.request) * 4 + i),
          static_cast<unsigned long long>(n));
    };
    add(0, count);
    add(1, admitted);
    add(2, missing - admitted);
  }
}

}  // namespace

namespace {

template <bool kStaged>
void launch(const Select& s, int64_t bytes, cudaStream_t stream) {
  static int64_t allowed = 46 << 10;  // what needs no asking, less the static part
  if (bytes > allowed) {
    check(cudaFuncSetAttribute(select_kernel<kStaged>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "select: shared memory for max_blocks and top_k");
    allowed = bytes;
  }
  select_kernel<kStaged>
      <<<dim3(s.heads.num_kv_heads, s.max_predictors), kThreads, bytes, stream>>>(s);
  check(cudaGetLastError(), "select");
}

}  // namespace

void select(const Select& s, cudaStream_t stream) {
  if (s.max_blocks > kMostBlocks) refuse("select: max_blocks", s.max_blocks, "at most 65535");
  const int64_t fixed = fixed_bytes(s.top_k, s.max_blocks, s.max_lanes);
  const int64_t scores = 4ll * s.max_lanes * ((s.max_blocks + 31) / 32) * 32;
  if (fixed + scores <= kStagedBytes)
    launch<true>(s, fixed + scores, stream);
  else
    launch<false>(s, fixed, stream);
}

int select_max_blocks(int top_k, int max_lanes) {
  int blocks = kMostBlocks;
  while (blocks > 0 && fixed_bytes(top_k, blocks, max_lanes) > kMostBytes) blocks -= 32;
  return blocks > 0 ? blocks : 0;
}

}  // namespace oasis::cuda
