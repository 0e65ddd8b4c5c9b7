// From the scores of a predictor's lanes to a key for each of its blocks: the larger, the sooner it
// is wanted. select.cu chooses by them.
#pragma once

#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda::selection {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// For each i < n, by all threads; not unrolled: few rounds, and what runs once should be short.
template <class F>
__device__ void each(int n, F f) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) f(i);
}

struct Shared {
  float* scores;   // [lane][stride]: here if they fit, else where they came from
  uint32_t* keys;  // [blocks], in place of the first lane's scores if those are here
  int32_t* bins;   // [kBins], how many ranks have each value of a digit, the largest first
  uint64_t *missing, *victims;  // [top_k], in place of the bins: what is left to choose from
  int32_t *slots, *steps;       // [top_k], the block in each slot and when it was last selected
  uint32_t *wanted, *resident;  // bit maps [blocks / 32]
  float* terms;                 // softmax_sum: [lane] maxima, [lane] sums, [warp][lane] parts
};

// Larger float, larger key; NaN below all. Sinks above all.
__device__ inline uint32_t key_of(float x) { return x != x ? 0 : ordered_bits(x); }

__device__ inline float power_scale(const Select& s) {  // softmax in powers of two
  return 1.44269504f * rsqrtf(static_cast<float>(s.heads.head_dim));
}

// The terms of softmax_sum: each lane's maximum, and its powers in place of its scores with the
// inverse of their sum. In a fixed order.
template <bool kStaged>
__device__ void lane_terms(const Select& s, const Predictor& p, int lanes, const Shared& sh) {
  constexpr int kTogether = 4;  // lanes at once, so that latencies overlap
  const float scale = power_scale(s);
  float *tops = sh.terms, *sums = tops + s.max_lanes, *parts = sums + s.max_lanes;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    for (int l0 = 0; l0 < lanes; l0 += kTogether) {
      float mine[kTogether], top[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        mine[k] = pass == 0 ? -INFINITY : 0.0f;
        top[k] = pass == 0 ? 0.0f : tops[min(l0 + k, lanes - 1)];
      }
      each((p.blocks + 3) / 4, [&](int i) {
        float4 v[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k)
          v[k] = reinterpret_cast<const float4*>(sh.scores + min(l0 + k, lanes - 1) * p.stride)[i];
#pragma unroll
        for (int j = 0; j < 4 * kTogether; ++j) {
          float& x = reinterpret_cast<float*>(v)[j];
          if (pass == 1) x = exp2f(x * scale - top[j / 4]);
          mine[j / 4] = pass == 0 ? fmaxf(mine[j / 4], x) : mine[j / 4] + x;
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k)
          if (kStaged && pass == 1 && l0 + k < lanes)
            reinterpret_cast<float4*>(sh.scores + (l0 + k) * p.stride)[i] = v[k];
      });
      for (int i = 16; pass == 1 && i > 0; i /= 2)
#pragma unroll
        for (int k = 0; k < kTogether; ++k) mine[k] += __shfl_xor_sync(~0u, mine[k], i);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (pass == 0) mine[k] = from_ordered_bits(__reduce_max_sync(~0u, ordered_bits(mine[k])));
        if (threadIdx.x % 32 == 0 && l0 + k < lanes) parts[warp * s.max_lanes + l0 + k] = mine[k];
      }
    }
    __syncthreads();
    each(lanes, [&](int l) {
      float all = parts[l];
      for (int w = 1; w < kWarps; ++w) {
        const float other = parts[w * s.max_lanes + l];
        all = pass == 0 ? fmaxf(all, other) : all + other;
      }
      (pass == 0 ? tops : sums)[l] = pass == 0 ? all * scale : 1.0f / all;
    });
    __syncthreads();
  }
}

// The keys of four blocks from `block` on.
template <bool kStaged, bool kSoftmax>
__device__ uint4 combined_keys(const Select& s, const Predictor& p, int block, const Shared& sh) {
  const float scale = power_scale(s);
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  int l = 0;
  for (int r = 0; r < p.staged_rows; ++r) {
    const float start = s.combine == GroupCombine::kMax ? -INFINITY : 0.0f;
    float group[4] = {start, start, start, start};
#pragma unroll(kSoftmax ? 4 : 1)
    for (int g = 0; g < s.heads.group; ++g, ++l) {
      const float4 v = *reinterpret_cast<const float4*>(sh.scores + l * p.stride + block);
      const float x[4] = {v.x, v.y, v.z, v.w};
      if constexpr (kSoftmax) {
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
  for (int k = 0; k < 4; ++k) keys[k] = block + k < s.sink_blocks ? ~0u : key_of(best[k]);
  return {keys[0], keys[1], keys[2], keys[3]};
}

}  // namespace oasis::cuda::selection
