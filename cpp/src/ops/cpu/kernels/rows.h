// Layers that work on each row by itself: RMS norm, SwiGLU, RoPE.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace oasis {
namespace OASIS_ISA {

void rms_norm(const float* x, int64_t rows, int64_t dim, const float* weight, float eps, float* out,
              [[maybe_unused]] int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows >= 32)
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * dim;
    Vec acc = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const Vec v = load(in + i);
      acc = acc + v * v;
    }
    float sum = hsum(acc);
    for (; i < dim; ++i) sum += in[i] * in[i];
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
    for (int64_t j = 0; j < dim; ++j) out[r * dim + j] = in[j] * scale * weight[j];
  }
}

void silu_mul(const float* gate_up, int64_t rows, int64_t inter, float* out,
              [[maybe_unused]] int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows >= 8)
  for (int64_t r = 0; r < rows; ++r) {
    const float* gate = gate_up + r * 2 * inter;
    const float* up = gate + inter;
    float* o = out + r * inter;
    int64_t i = 0;
    for (; i + kLanes <= inter; i += kLanes) {
      const Vec g = load(gate + i);
      store(o + i, g / (1.0f + vexp(-g)) * load(up + i));
    }
    if (i < inter) {
      float g[kLanes] = {}, u[kLanes] = {};
      for (int64_t j = i; j < inter; ++j) g[j - i] = gate[j], u[j - i] = up[j];
      const Vec gv = load(g);
      store(g, gv / (1.0f + vexp(-gv)) * load(u));
      for (int64_t j = i; j < inter; ++j) o[j] = g[j - i];
    }
  }
}

void rope(const float* x, int heads, int head_dim, const float* cos, const float* sin, float* out) {
  const int half = head_dim / 2;
  for (int h = 0; h < heads; ++h) {
    const float* a = x + h * head_dim;
    float* o = out + h * head_dim;
    for (int d = 0; d < half; ++d) {
      const float lo = a[d], hi = a[d + half];
      o[d] = lo * cos[d] - hi * sin[d];
      o[d + half] = hi * cos[d] + lo * sin[d];
    }
  }
}

}  // namespace OASIS_ISA
}  // namespace oasis
