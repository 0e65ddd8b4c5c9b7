// What the kernels of attention and scoring share: the units of their work, scoring's factors, and
// the float32 ones' inner product.
#pragma once

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// Units are (split, KV head, lane tile), the tile fastest.
struct AttentionUnit {
  AttentionSplit split;
  Segment segment;
  int head, tile;
};

__device__ inline AttentionUnit unit_at(const Attention& a, int unit) {
  const int per_split = a.heads.num_kv_heads * a.max_lane_tiles;
  AttentionUnit u;
  u.split = a.splits[unit / per_split];
  u.segment = a.segments[u.split.segment];
  u.head = unit % per_split / a.max_lane_tiles;
  u.tile = unit % a.max_lane_tiles;
  return u;
}

__device__ inline bool idle(const Attention& a, const AttentionUnit& u) {
  return u.tile * kLaneTile >= u.segment.rows * a.heads.group;
}

struct ScoreUnit {
  ScoreSplit split;
  Predictor predictor;
  int head, tile;
};

__device__ inline ScoreUnit unit_at(const Score& s, int unit) {
  const int per_split = s.heads.num_kv_heads * s.max_lane_tiles;
  ScoreUnit u;
  u.split = s.splits[unit / per_split];
  u.predictor = s.predictors[u.split.predictor];
  u.head = unit % per_split / s.max_lane_tiles;
  u.tile = unit % s.max_lane_tiles;
  return u;
}

__device__ inline bool idle(const Score& s, const ScoreUnit& u) {
  return u.tile * kLaneTile >= u.predictor.staged_rows * s.heads.group;
}

// What multiplies a block's first (half 0) or second vector, from an element of the query.
__device__ inline float score_factor(float q, SummaryKind kind, int half) {
  if (kind == SummaryKind::kMeanStd) return half == 0 ? q : fabsf(q);
  if (kind == SummaryKind::kMinMax)
    return half == 0 ? (q < 0.0f ? 0.0f : q) : (q > 0.0f ? 0.0f : q);
  return q;
}

// The score of `halves` from its two products: the larger; NaN if either is.
__device__ inline float larger(float x, float y) { return x > y || x != x ? x : y; }

// sum + x . y, in the order of the elements.
__device__ inline float dot(float4 x, float4 y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

}  // namespace oasis::cuda
