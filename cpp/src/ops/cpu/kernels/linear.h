// out = x . weight^T + bias.
// packed: [panel][k][32]. x is repacked to [tile][k][R], so that the inner loop reads two streams.
// Bytes: the weights once; floor: weights / memory bandwidth at few rows, FMAs at many.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace oasis {
namespace OASIS_ISA {

#if defined(__AVX512F__)
static constexpr int kRowTile = 12;
#else
static constexpr int kRowTile = 4;
#endif

void pack_weight(const float* w, int64_t n, int64_t k, float* packed) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t c = 0; c < kPanel; ++c) {
        const int64_t col = p * kPanel + c;
        packed[(p * k + i) * kPanel + c] = col < n ? w[col * k + i] : 0.0f;
      }
}

template <int R>
static void linear_tile(const float* xt, const float* panel, int64_t k, int64_t n0, int64_t n,
                        const float* bias, float* out) {
  Vec acc[R][2] = {};
  for (int64_t i = 0; i < k; ++i) {
    const Vec w0 = load(panel + i * kPanel), w1 = load(panel + i * kPanel + kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec x = splat(xt[i * R + r]);
      acc[r][0] = acc[r][0] + x * w0;
      acc[r][1] = acc[r][1] + x * w1;
    }
  }
  const int64_t cols = n - n0 < kPanel ? n - n0 : kPanel;
  for (int r = 0; r < R; ++r) {
    float* row = out + r * n + n0;
    float tmp[kPanel];
    store(tmp, acc[r][0]);
    store(tmp + kLanes, acc[r][1]);
    for (int64_t c = 0; c < cols; ++c) row[c] = bias ? tmp[c] + bias[n0 + c] : tmp[c];
  }
}

typedef void (*LinearTile)(const float*, const float*, int64_t, int64_t, int64_t, const float*,
                           float*);

#if defined(__AVX512F__)
static const LinearTile kTiles[] = {
    nullptr,         linear_tile<1>,  linear_tile<2>, linear_tile<3>, linear_tile<4>,
    linear_tile<5>,  linear_tile<6>,  linear_tile<7>, linear_tile<8>, linear_tile<9>,
    linear_tile<10>, linear_tile<11>, linear_tile<12>};
#else
static const LinearTile kTiles[] = {nullptr, linear_tile<1>, linear_tile<2>, linear_tile<3>,
                                    linear_tile<4>};
#endif

void linear(const float* x, int64_t rows, const float* packed, int64_t n, int64_t k,
            const float* bias, float* out, float* scratch, [[maybe_unused]] int num_threads) {
  const int64_t tiles = (rows + kRowTile - 1) / kRowTile;
  const int64_t panels = (n + kPanel - 1) / kPanel;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t r0 = t * kRowTile;
      const int r_count = static_cast<int>(rows - r0 < kRowTile ? rows - r0 : kRowTile);
      float* xt = scratch + r0 * k;
      for (int64_t i = 0; i < k; ++i)
        for (int r = 0; r < r_count; ++r) xt[i * r_count + r] = x[(r0 + r) * k + i];
    }
#pragma omp for schedule(dynamic, 2)
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t r0 = t * kRowTile;
        const int r_count = static_cast<int>(rows - r0 < kRowTile ? rows - r0 : kRowTile);
        kTiles[r_count](scratch + r0 * k, packed + p * k * kPanel, k, p * kPanel, n, bias,
                        out + r0 * n);
      }
  }
}

}  // namespace OASIS_ISA
}  // namespace oasis
