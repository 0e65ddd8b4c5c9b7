// Logits to tokens.
//
// greedy: grid (part of 8,192 logits, row); the parts of a row meet in an atomic maximum, and the
// last to arrive writes the token. Bytes: the logits once. Floor: those bytes / memory bandwidth.
//
// random: one CTA a row. Candidates are ordered by (logit descending, id ascending) and never
// sorted: every cut (top_k, top_p, min_p, the draw) is "the first candidate at which a running sum
// reaches a target", found by three histograms over the bits of the logits. Weights are
// exp((x - max) / temperature) in fixed point, so that their sums are the same in any order. Bytes:
// the logits 5 to 11 times, mostly out of L2, at what one SM can read (about 100 GB/s). Floor: one
// exp in float64 a logit, about 40 us for 151,936 of them.
#include <cfloat>

#include "oasis/philox.h"
#include "ops/cuda/check.h"
#include "ops/cuda/tokens.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

using Sum = unsigned long long;

constexpr int kGreedyThreads = 256, kGreedyLoads = 8;
constexpr int kGreedyPart = kGreedyThreads * kGreedyLoads * 4;
constexpr int kRandomThreads = 512, kBins = 2048;
// The largest weight. 2^19 of them still fit 63 bits; what is rounded off is at most 2^-26 of a
// row's sum.
constexpr int kWeightBits = 44, kMaxVocab = 1 << 19;

// Four logits from x[i]; what lies beyond the row loses against each of its logits.
template <bool kAligned>
__device__ float4 load_four(const float* x, int i, int vocab) {
  if constexpr (kAligned)
    if (i < vocab) return *reinterpret_cast<const float4*>(x + i);
  float4 v{-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
  if constexpr (!kAligned) {
    if (i < vocab) v.x = x[i];
    if (i + 1 < vocab) v.y = x[i + 1];
    if (i + 2 < vocab) v.z = x[i + 2];
    if (i + 3 < vocab) v.w = x[i + 3];
  }
  return v;
}

// The best of a thread's logits, met in ascending order of their ids.
struct Best {
  float logit = -INFINITY;
  int id = 0;
  bool finite = true;

  __device__ void meet(float x, int i) {
    finite = finite && fabsf(x) <= FLT_MAX;
    if (x > logit) logit = x, id = i;
  }
  // Larger for the larger logit, then the lower id; above all finite ones if one was not.
  __device__ Sum rank() const {
    return static_cast<Sum>(finite ? ordered_bits(logit) : ~0u) << 32 | static_cast<uint32_t>(~id);
  }
};
__device__ bool finite_rank(Sum rank) { return rank >> 32 != ~0u; }
__device__ int id_of(Sum rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

// Over the CTA, in every thread.
template <int kThreads, class F>
__device__ Sum cta_reduce(Sum x, F op) {
  __shared__ Sum parts[kThreads / 32];
  for (int i = 16; i > 0; i /= 2) x = op(x, __shfl_xor_sync(~0u, x, i));
  __syncthreads();  // the parts of the time before are read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[threadIdx.x % (kThreads / 32)];
  for (int i = kThreads / 64; i > 0; i /= 2) x = op(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
struct Larger {
  __device__ Sum operator()(Sum a, Sum b) const { return a > b ? a : b; }
};
struct Plus {
  __device__ Sum operator()(Sum a, Sum b) const { return a + b; }
};

// One thread; token -1: the row's logits are not finite.
__device__ void write_token(const Sample& s, int row, const LogitsRow& r, int token) {
  s.result[row] = token;
  if (token < 0) return;
  s.tables.tokens[r.request * s.tables.stride + r.position + 1] = token;
  s.tables.lengths[r.request] = r.position + 2;
}

template <bool kAligned>
__global__ void __launch_bounds__(kGreedyThreads)
    greedy_kernel(Sample s, const Sampling* sampling) {
  const int row = blockIdx.y;
  const LogitsRow r = s.rows[row];
  if (r.row < 0 || (sampling && sampling[r.request].temperature > 0.0f)) return;
  const float* x = s.logits + static_cast<int64_t>(row) * s.vocab;
  const int first = blockIdx.x * kGreedyPart + threadIdx.x * 4;
  float4 v[kGreedyLoads];
#pragma unroll
  for (int k = 0; k < kGreedyLoads; ++k)
    v[k] = load_four<kAligned>(x, first + k * kGreedyThreads * 4, s.vocab);
  Best best;
#pragma unroll
  for (int k = 0; k < kGreedyLoads; ++k) {
    const int i = first + k * kGreedyThreads * 4;
    best.meet(v[k].x, i);
    best.meet(v[k].y, i + 1);
    best.meet(v[k].z, i + 2);
    best.meet(v[k].w, i + 3);
  }
  const Sum rank = cta_reduce<kGreedyThreads>(best.rank(), Larger{});
  if (threadIdx.x > 0) return;
  SampleWork& work = s.work[row];
  atomicMax(&work.best, rank);
  __threadfence();
  if (atomicAdd(&work.arrivals, 1) != static_cast<int>(gridDim.x) - 1) return;
  __threadfence();
  const Sum top = atomicExch(&work.best, 0);
  work.arrivals = 0;
  write_token(s, row, r, finite_rank(top) ? id_of(top) : -1);
}

// A row's logits as weights.
template <bool kAligned>
struct Distribution {
  const float* logits;
  int vocab;
  double top, inverse_temperature;

  // exp((x - top) / temperature), in 0..1
  __device__ double power(float x) const {
    return exp((static_cast<double>(x) - top) * inverse_temperature);
  }
  __device__ Sum weight(float x) const {
    return __double2ull_rn(power(x) * static_cast<double>(1ull << kWeightBits));
  }
  // f(logit, id) for each; a thread meets its own in ascending order of their ids.
  template <class F>
  __device__ void for_each(F f) const {
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < vocab; i += kRandomThreads * 4) {
      const float4 v = load_four<kAligned>(logits, i, vocab);
      f(v.x, i);
      if (kAligned || i + 1 < vocab) f(v.y, i + 1);
      if (kAligned || i + 2 < vocab) f(v.z, i + 2);
      if (kAligned || i + 3 < vocab) f(v.w, i + 3);
    }
  }
};

// Sums of 64 bits out of additions of 32 bits, which shared memory does by itself.
struct Histogram {
  uint32_t low[kBins], high[kBins];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kRandomThreads) low[i] = high[i] = 0;
    __syncthreads();
  }
  __device__ void add(uint32_t bin, Sum x) {
    if (x == 0) return;
    const uint32_t part = static_cast<uint32_t>(x), before = atomicAdd(&low[bin], part);
    const uint32_t carry = before + part < before;
    if (const uint32_t rest = static_cast<uint32_t>(x >> 32) + carry) atomicAdd(&high[bin], rest);
  }
  __device__ Sum sum(int bin) const { return static_cast<Sum>(high[bin]) << 32 | low[bin]; }
};

struct Bin {
  uint32_t bin;
  Sum above;  // the sum of the bins above it
};

// The bin, from the highest down, at which the running sum reaches `target`, at most their sum.
__device__ Bin reach(const Histogram& h, Sum target) {
  constexpr int kEach = kBins / kRandomThreads;
  __shared__ Sum warps[kRandomThreads / 32];
  __shared__ Bin found;
  const int bin = kBins - 1 - kEach * threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Sum mine = 0;
  for (int i = 0; i < kEach; ++i) mine += h.sum(bin - i);
  Sum sum = mine;
  for (int i = 1; i < 32; i *= 2) {
    const Sum other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += warps[w];
  Sum before = sum - mine;
  if (before < target && target <= sum)
    for (int i = 0; i < kEach; ++i) {
      const Sum x = h.sum(bin - i);
      if (target <= before + x) {
        found = {static_cast<uint32_t>(bin - i), before};
        break;
      }
      before += x;
    }
  __syncthreads();
  return found;
}

// Where a running sum over the candidates reaches its target.
struct Place {
  uint32_t key;  // ordered_bits of the logit there
  Sum above;     // the sum over all larger logits
};

// The keys' bits 31..21, 20..10, 9..0 in turn. `first`: the histogram of bits 31..21, if it is
// known.
template <class D, class F>
__device__ Place locate(const D& d, F weight, Sum target, const Histogram* first,
                        Histogram& scratch) {
  Place place{0, 0};
  for (int level = 0; level < 3; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;  // bits below the level's
    const Histogram* h = level == 0 && first ? first : &scratch;
    if (h == &scratch) {
      const int known = level == 1 ? 21 : 10;  // bits below those that are settled
      scratch.clear();
      d.for_each([&](float x, int) {
        const uint32_t key = ordered_bits(x);
        if (level == 0 || key >> known == place.key >> known)
          scratch.add(key >> shift & (kBins - 1) >> (level == 2), weight(x));
      });
      __syncthreads();
    }
    const Bin b = reach(*h, target - place.above);
    place.key |= b.bin << shift;
    place.above += b.above;
  }
  return place;
}

// The id of the logit with this key that has `before` others of lower id. One thread has it, the
// others -1.
template <class D>
__device__ int nth_of_key(const D& d, uint32_t key, Sum before) {
  constexpr int kWarps = kRandomThreads / 32;
  __shared__ int counts[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            each = (d.vocab + kWarps - 1) / kWarps;
  const int begin = warp * each, end = min(begin + each, d.vocab);
  auto found = [&](int i) {  // of the warp's 32 from i on
    return __ballot_sync(~0u, i + lane < end && ordered_bits(d.logits[i + lane]) == key);
  };
  int mine = 0;
#pragma unroll 4
  for (int i = begin; i < end; i += 32) mine += __popc(found(i));
  if (lane == 0) counts[warp] = mine;
  __syncthreads();
  int left = static_cast<int>(before);
  for (int w = 0; w < warp; ++w) left -= counts[w];
  if (left < 0 || left >= mine) return -1;
  for (int i = begin; i < end; i += 32) {
    uint32_t hits = found(i);
    if (left >= __popc(hits)) {
      left -= __popc(hits);
      continue;
    }
    for (; left > 0; --left) hits &= hits - 1;
    return lane == 0 ? i + __ffs(hits) - 1 : -1;
  }
  return -1;
}

// The sum of the weights up to and with the candidates that p.top_k and p.top_p keep. `total`: of
// all weights; `masses`: their histogram by the upper bits.
template <class D>
__device__ Sum kept_by_rank(const D& d, const Sampling& p, Sum total, const Histogram& masses,
                            Histogram& scratch) {
  const auto weight = [&](float x) { return d.weight(x); };
  if (p.top_k > 0 && p.top_k < d.vocab) {
    const Place last = locate(d, [](float) { return Sum{1}; }, p.top_k, nullptr, scratch);
    Sum above = 0;
    d.for_each([&](float x, int) {
      if (ordered_bits(x) > last.key) above += d.weight(x);
    });
    total = cta_reduce<kRandomThreads>(above, Plus{}) +
            (p.top_k - last.above) * d.weight(from_ordered_bits(last.key));
  }
  if (p.top_p < 1.0f) {
    const Sum wanted = static_cast<Sum>(ceil(static_cast<double>(p.top_p) * total));
    const Sum target = min(max(wanted, Sum{1}), total);
    const Place last = locate(d, weight, target, &masses, scratch);
    const Sum each = d.weight(from_ordered_bits(last.key));
    total = last.above + (target - last.above + each - 1) / each * each;
  }
  return total;
}

template <bool kAligned>
__global__ void __launch_bounds__(kRandomThreads, 1)
    random_kernel(Sample s, const Sampling* sampling) {
  __shared__ Histogram masses, scratch;
  const int row = blockIdx.x;
  const LogitsRow r = s.rows[row];
  if (r.row < 0) return;
  const Sampling p = sampling[r.request];
  if (!(p.temperature > 0.0f)) return;
  Distribution<kAligned> d{s.logits + static_cast<int64_t>(row) * s.vocab, s.vocab, 0.0,
                           1.0 / static_cast<double>(p.temperature)};
  Best best;
  d.for_each([&](float x, int i) { best.meet(x, i); });
  const Sum top = cta_reduce<kRandomThreads>(best.rank(), Larger{});
  if (!finite_rank(top)) {
    if (threadIdx.x == 0) write_token(s, row, r, -1);
    return;
  }
  d.top = d.logits[id_of(top)];

  masses.clear();
  Sum total = 0, likely = 0;  // likely: of those that min_p keeps
  d.for_each([&](float x, int) {
    const double power = d.power(x);
    const Sum weight = __double2ull_rn(power * static_cast<double>(1ull << kWeightBits));
    masses.add(ordered_bits(x) >> 21, weight);
    total += weight;
    if (power >= static_cast<double>(p.min_p)) likely += weight;
  });
  total = cta_reduce<kRandomThreads>(total, Plus{});
  likely = cta_reduce<kRandomThreads>(likely, Plus{});
  // Each filter keeps a first part of the same order, so the smallest sum is that of them all.
  const Sum kept = min(kept_by_rank(d, p, total, masses, scratch), likely);
  const double uniform = philox_uniform(p.seed, static_cast<uint64_t>(r.position) + 1);
  const Sum target = min(static_cast<Sum>(uniform * kept) + 1, kept);
  const Place drawn = locate(d, [&](float x) { return d.weight(x); }, target, &masses, scratch);
  const Sum each = d.weight(from_ordered_bits(drawn.key));
  const int token = nth_of_key(d, drawn.key, (target - drawn.above - 1) / each);
  if (token >= 0) write_token(s, row, r, token);
}

template <bool kAligned>
void launch(const Sample& s, const Sampling* sampling, int64_t n, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(n);
  const unsigned parts = (s.vocab + kGreedyPart - 1) / kGreedyPart;
  greedy_kernel<kAligned><<<dim3(parts, rows), kGreedyThreads, 0, stream>>>(s, sampling);
  if (sampling) random_kernel<kAligned><<<rows, kRandomThreads, 0, stream>>>(s, sampling);
  check(cudaGetLastError(), "sample");
}

void launch_any(const Sample& s, const Sampling* sampling, int64_t n, cudaStream_t stream) {
  if (s.vocab < 1 || s.vocab > kMaxVocab) refuse("sample: vocab", s.vocab, "1 to 524288");
  if (n > 65535) refuse("sample: n", n, "at most 65535");
  if (n == 0) return;
  if (s.vocab % 4 == 0)
    launch<true>(s, sampling, n, stream);
  else
    launch<false>(s, sampling, n, stream);
}

}  // namespace

void sample_greedy(const Sample& s, int64_t n, cudaStream_t stream) {
  launch_any(s, nullptr, n, stream);
}

void sample_random(const Sample& s, const Sampling* sampling, int64_t n, cudaStream_t stream) {
  launch_any(s, sampling, n, stream);
}

}  // namespace oasis::cuda
