// Block summaries, their scores for a query, and the softmax over blocks (docs/design.md, section
// 5).
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace oasis {
namespace OASIS_ISA {

void summarize(SummaryKind kind, const float* keys, int head_dim, float* ab) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Vec a, b;
    if (kind == SummaryKind::kMinMax) {
      a = b = load(keys + d);
      for (int j = 1; j < kBlockTokens; ++j) {
        const Vec k = load(keys + j * head_dim + d);
        a = vmax(a, k);
        b = k < b ? k : b;
      }
    } else {
      Vec half[2] = {};
      for (int j = 0; j < kBlockTokens; ++j)
        half[j / 8] = half[j / 8] + load(keys + j * head_dim + d);
      if (kind == SummaryKind::kHalves) {
        a = half[0] * 0.125f;
        b = half[1] * 0.125f;
      } else {
        a = (half[0] + half[1]) * 0.0625f;
        Vec var = {};
        for (int j = 0; j < kBlockTokens; ++j) {
          const Vec off = load(keys + j * head_dim + d) - a;
          var = var + off * off;
        }
        for (int i = 0; i < kLanes; ++i) b[i] = sqrtf(var[i] * 0.0625f);
      }
    }
    store(ab + d, a);
    store(ab + head_dim + d, b);
  }
}

void score(SummaryKind kind, const float* q, const float* ab, int64_t blocks, int head_dim,
           float* out) {
  for (int64_t i = 0; i < blocks; ++i) {
    const float* a = ab + i * 2 * head_dim;
    const float* b = a + head_dim;
    Vec s1 = {}, s2 = {};
    for (int d = 0; d < head_dim; d += kLanes) {
      const Vec x = load(q + d);
      switch (kind) {
        case SummaryKind::kMeanStd:
          s1 = s1 + x * load(a + d);
          s2 = s2 + vabs(x) * load(b + d);
          break;
        case SummaryKind::kMinMax:
          s1 = s1 + vmax(x, Vec{}) * load(a + d);
          s2 = s2 + (x < 0.0f ? x : Vec{}) * load(b + d);
          break;
        case SummaryKind::kHalves:
          s1 = s1 + x * load(a + d);
          s2 = s2 + x * load(b + d);
          break;
      }
    }
    const float first = hsum(s1), second = hsum(s2);
    out[i] = kind == SummaryKind::kHalves ? (second > first ? second : first) : first + second;
  }
}

void softmax(float* x, int64_t n, float scale) {
  float top = -INFINITY;
  for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  if (top == -INFINITY) top = 0.0f;
  Vec sum = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    float tmp[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) tmp[j] = i + j < n ? (x[i + j] - top) * scale : -INFINITY;
    const Vec e = vexp(load(tmp));
    sum = sum + (e == e ? e : Vec{});  // a NaN score must not hide the others
    store(tmp, e);
    for (int64_t j = 0; j < kLanes && i + j < n; ++j) x[i + j] = tmp[j];
  }
  const float inv = 1.0f / hsum(sum);
  for (int64_t i = 0; i < n; ++i) x[i] *= inv;
}

}  // namespace OASIS_ISA
}  // namespace oasis
