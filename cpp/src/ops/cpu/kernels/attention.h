// Query rows x group are lanes, 16 to a tile; keys run in reading order in fixed splits of 512
// tokens, each an online softmax, merged in order. Partial of a split: m[16], l[16], acc[D][16].
// Bytes: each page's K and V once per tile; floor: those bytes / memory bandwidth.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace oasis {
namespace OASIS_ISA {

static constexpr int kSplitPages = 32;  // 512 tokens: the fixed split of the keys

struct TileView {
  const AttentionArgs* args;
  const AttentionSegment* seg;
  int head;
  int64_t lane0;  // first lane of the tile; lane = row * G + g
  int lanes;
};

static constexpr int64_t partial_floats(int head_dim) {
  return (2 + head_dim) * static_cast<int64_t>(kLanes);
}

static void load_queries(const TileView& t, float* qt) {
  const AttentionArgs& a = *t.args;
  const float scale = 1.0f / sqrtf(static_cast<float>(a.head_dim));
  for (int i = 0; i < kLanes; ++i) {
    if (i >= t.lanes) {
      for (int d = 0; d < a.head_dim; ++d) qt[d * kLanes + i] = 0.0f;
      continue;
    }
    const int64_t row = (t.lane0 + i) / a.group, g = (t.lane0 + i) % a.group;
    const float* q =
        t.seg->q + row * a.q_stride + (static_cast<int64_t>(t.head) * a.group + g) * a.head_dim;
    for (int d = 0; d < a.head_dim; ++d) qt[d * kLanes + i] = q[d] * scale;
  }
}

static void attend_split(const TileView& t, const float* qt, int64_t page_begin, int64_t page_end,
                         float* partial) {
  const AttentionArgs& a = *t.args;
  const int dim = a.head_dim;
  const int64_t head_floats = int64_t{2} * kBlockTokens * dim;
  Vec visible;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t row = (t.lane0 + (i < t.lanes ? i : t.lanes - 1)) / a.group;
    visible[i] = static_cast<float>(t.seg->visible + row);
  }
  const int64_t all_see = t.seg->visible + t.lane0 / a.group;
  Vec m = splat(-INFINITY), l = {};
  float* acc = partial + 2 * kLanes;
  for (int d = 0; d < dim; ++d) store(acc + d * kLanes, Vec{});

  for (int64_t p = page_begin; p < page_end; ++p) {
    const float* keys =
        a.pool + (static_cast<int64_t>(t.seg->pages[p]) * a.num_kv_heads + t.head) * head_floats;
    const float* values = keys + kBlockTokens * dim;
    Vec s[kBlockTokens] = {};
    for (int j0 = 0; j0 < kBlockTokens; j0 += 8) {
      Vec part[8] = {};
      for (int d = 0; d < dim; ++d) {
        const Vec q = load(qt + d * kLanes);
        for (int j = 0; j < 8; ++j) part[j] = part[j] + q * keys[(j0 + j) * dim + d];
      }
      for (int j = 0; j < 8; ++j) s[j0 + j] = part[j];
    }
    int tokens = kBlockTokens;
    const bool masked = (p + 1) * kBlockTokens > all_see;
    if (masked) {
      const int64_t last_row = (t.lane0 + t.lanes - 1) / a.group;
      const int64_t seen = t.seg->visible + last_row - p * kBlockTokens;
      tokens = seen < kBlockTokens ? static_cast<int>(seen) : kBlockTokens;
      for (int j = 0; j < tokens; ++j)
        s[j] = splat(static_cast<float>(p * kBlockTokens + j)) < visible ? s[j] : splat(-INFINITY);
    }
    Vec top = m;
    for (int j = 0; j < tokens; ++j) top = vmax(top, s[j]);
    const Vec base =
        top == splat(-INFINITY) ? Vec{} : top;  // a lane that sees nothing of this split yet
    const Vec corr = vexp(m - base);
    l = l * corr;
    for (int j = 0; j < tokens; ++j) {
      s[j] = vexp(s[j] - base);
      l = l + s[j];
    }
    m = top;
    if (!masked) {
      for (int d = 0; d < dim; d += 8) {
        Vec o[8];
        for (int i = 0; i < 8; ++i) o[i] = load(acc + (d + i) * kLanes) * corr;
        for (int j = 0; j < kBlockTokens; ++j)
          for (int i = 0; i < 8; ++i) o[i] = o[i] + s[j] * values[j * dim + d + i];
        for (int i = 0; i < 8; ++i) store(acc + (d + i) * kLanes, o[i]);
      }
    } else {
      for (int d = 0; d < dim; ++d) {
        Vec o = load(acc + d * kLanes) * corr;
        // Not just a weight of 0: a value that a lane must not see may be NaN.
        for (int j = 0; j < tokens; ++j) o = s[j] == Vec{} ? o : o + s[j] * values[j * dim + d];
        store(acc + d * kLanes, o);
      }
    }
  }
  store(partial, m);
  store(partial + kLanes, l);
}

// total = total (+) part, in that order.
static void merge(float* total, const float* part, int dim) {
  const Vec m1 = load(total), m2 = load(part);
  const Vec top = vmax(m1, m2);
  const Vec base = top == splat(-INFINITY) ? Vec{} : top;
  const Vec c1 = vexp(m1 - base), c2 = vexp(m2 - base);
  store(total, top);
  store(total + kLanes, load(total + kLanes) * c1 + load(part + kLanes) * c2);
  for (int d = 2; d < dim + 2; ++d)
    store(total + d * kLanes, load(total + d * kLanes) * c1 + load(part + d * kLanes) * c2);
}

static void write_out(const TileView& t, const float* total) {
  const AttentionArgs& a = *t.args;
  for (int i = 0; i < t.lanes; ++i) {
    const int64_t row = (t.lane0 + i) / a.group, g = (t.lane0 + i) % a.group;
    float* out =
        t.seg->out + row * a.out_stride + (static_cast<int64_t>(t.head) * a.group + g) * a.head_dim;
    const float inv = 1.0f / total[kLanes + i];
    for (int d = 0; d < a.head_dim; ++d) out[d] = total[(2 + d) * kLanes + i] * inv;
  }
}

static int64_t tiles_of(const AttentionArgs& a, const AttentionSegment& s) {
  return (static_cast<int64_t>(s.rows) * a.group + kLanes - 1) / kLanes;
}

static TileView tile_view(const AttentionArgs& a, const AttentionSegment& s, int head,
                          int64_t tile) {
  const int64_t lane0 = tile * kLanes, all = static_cast<int64_t>(s.rows) * a.group;
  return {&a, &s, head, lane0, static_cast<int>(all - lane0 < kLanes ? all - lane0 : kLanes)};
}

static int64_t pages_of(const TileView& t) {
  const int64_t last_row = (t.lane0 + t.lanes - 1) / t.args->group;
  return (t.seg->visible + last_row + kBlockTokens - 1) / kBlockTokens;
}

static int64_t splits_of(int64_t pages) { return (pages + kSplitPages - 1) / kSplitPages; }

static void split(const TileView& t, const float* qt, int64_t index, float* partial) {
  const int64_t pages = pages_of(t), begin = index * kSplitPages;
  attend_split(t, qt, begin, begin + kSplitPages < pages ? begin + kSplitPages : pages, partial);
}

// A segment of one tile (decode) is spread over (head, split); a larger one (prefill) over (head,
// tile).
static bool by_split(const AttentionArgs& a, const AttentionSegment& s) {
  return tiles_of(a, s) == 1;
}

static int64_t items_of(const AttentionArgs& a, const AttentionSegment& s) {
  const int64_t each = by_split(a, s) ? splits_of(pages_of(tile_view(a, s, 0, 0))) : tiles_of(a, s);
  return each * a.num_kv_heads;
}

int64_t attention_scratch(const AttentionArgs& a) {
  int64_t items = 0;
  for (int i = 0; i < a.num_segments; ++i)
    if (by_split(a, a.segments[i])) items += items_of(a, a.segments[i]);
  return items * partial_floats(a.head_dim);
}

static void whole_tile(const TileView& t) {
  alignas(64) float qt[256 * kLanes], total[258 * kLanes], part[258 * kLanes];
  load_queries(t, qt);
  split(t, qt, 0, total);
  const int64_t splits = splits_of(pages_of(t));
  for (int64_t s = 1; s < splits; ++s) {
    split(t, qt, s, part);
    merge(total, part, t.args->head_dim);
  }
  write_out(t, total);
}

void attention(const AttentionArgs& a) {
  int64_t total_items = 0;
  for (int i = 0; i < a.num_segments; ++i) total_items += items_of(a, a.segments[i]);
  const int64_t part_size = partial_floats(a.head_dim);

#pragma omp parallel num_threads(a.num_threads) if (a.num_threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < total_items; ++item) {
      int64_t local = item, partials = 0;
      const AttentionSegment* s = a.segments;
      for (;; ++s) {
        const int64_t count = items_of(a, *s);
        if (local < count) break;
        local -= count;
        if (by_split(a, *s)) partials += count;
      }
      const int64_t each = items_of(a, *s) / a.num_kv_heads;
      const int head = static_cast<int>(local / each);
      if (by_split(a, *s)) {
        alignas(64) float qt[256 * kLanes];
        const TileView t = tile_view(a, *s, head, 0);
        load_queries(t, qt);
        split(t, qt, local % each, a.scratch + (partials + local) * part_size);
      } else {
        whole_tile(tile_view(a, *s, head, local % each));
      }
    }
#pragma omp single
    {
      int64_t partials = 0;
      for (int i = 0; i < a.num_segments; ++i) {
        const AttentionSegment& s = a.segments[i];
        if (!by_split(a, s)) continue;
        const int64_t each = items_of(a, s) / a.num_kv_heads;
        for (int h = 0; h < a.num_kv_heads; ++h, partials += each) {
          float* total = a.scratch + partials * part_size;
          for (int64_t k = 1; k < each; ++k) merge(total, total + k * part_size, a.head_dim);
          write_out(tile_view(a, s, h, 0), total);
        }
      }
    }
  }
}

}  // namespace OASIS_ISA
}  // namespace oasis
