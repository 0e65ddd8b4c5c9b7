// Vectors of 16 floats: one AVX-512 register, or two of AVX2. Part of kernels.cpp, which names
// OASIS_ISA.
#pragma once

#include <math.h>
#include <stdint.h>

#include "oasis/ops.h"

namespace oasis {
namespace OASIS_ISA {

typedef float Vec __attribute__((vector_size(64)));
typedef float VecU __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(64)));

static constexpr int kLanes = 16;

static inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }
static inline Vec splat(float x) { return Vec{} + x; }
static inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec vabs(Vec a) { return a < 0.0f ? -a : a; }

// exp to 2 ulp; exactly 0 below -87.3, infinity above 88.7, NaN for NaN.
static inline Vec vexp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.72f);
  Vec c = x < low ? low : x;
  c = c > high ? high : c;
  const Vec magic = splat(12582912.0f);
  const Vec n = (c * 1.44269504088896341f + magic) - magic;
  Vec r = c - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: n = 128 alone would overflow the exponent field.
  const VecI ni = __builtin_convertvector(n, VecI);
  const VecI half = ni >> 1;
  const Vec f1 = reinterpret_cast<Vec>((half + 127) << 23);
  const Vec f2 = reinterpret_cast<Vec>((ni - half + 127) << 23);
  Vec y = p * f1 * f2;
  y = x < low ? Vec{} : y;
  y = x > high ? splat(INFINITY) : y;
  return x == x ? y : x;
}

static inline float hsum(Vec v) {
  float s[kLanes];
  store(s, v);
  for (int w = kLanes / 2; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) s[i] += s[i + w];
  return s[0];
}

}  // namespace OASIS_ISA
}  // namespace oasis
