// Attention of prefill rows: hundreds to thousands of rows of a segment, bound by arithmetic, where
// attention() is bound by memory. For eager steps: the list of tiles comes from the host.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// The unit of work: kPrefillLanes lanes of one segment and KV head, where lane i is query head i %
// group of row i / group. Rows and heads share a tile so that the heads of a group read K and V
// once, short segments fill tiles, and fewer tokens on the diagonal are computed in vain.
inline constexpr int kPrefillLanes = 128;
struct PrefillTile {
  int32_t segment, kv_head, lane_begin;
};

struct Prefill {
  DType dtype;           // float16 or bfloat16
  Heads heads;           // head_dim 64 or 128
  const void *q, *pool;  // q [rows][Hq][D]; pool: one layer, [page][H][K|V][16][D]
  void* out;             // [rows][Hq][D]
  const Segment* segments;
  const int32_t* pages;
  const PrefillTile* tiles;
  int num_tiles;
  int64_t num_pages;  // of the pool
};
void prefill(const Prefill& p, cudaStream_t stream);

// The tiles of segments, in the order to run them. The last ones must be light, for the SMs to end
// together, and neighbours should read the same K and V, for these to stay in the L2 cache: so the
// segment with the most tokens first, head after head, and of each head the last rows first.
inline std::vector<PrefillTile> prefill_tiles(const std::vector<Segment>& segments,
                                              const Heads& heads) {
  std::vector<int32_t> order(segments.size());
  std::iota(order.begin(), order.end(), 0);
  auto tokens = [&](int32_t i) { return int64_t{segments[i].visible} + segments[i].rows; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return tokens(a) > tokens(b); });
  std::vector<PrefillTile> tiles;
  for (int32_t i : order) {
    const int32_t count = (segments[i].rows * heads.group + kPrefillLanes - 1) / kPrefillLanes;
    for (int32_t head = 0; head < heads.num_kv_heads; ++head)
      for (int32_t t = count; t-- > 0;) tiles.push_back({i, head, t * kPrefillLanes});
  }
  return tiles;
}

}  // namespace oasis::cuda
