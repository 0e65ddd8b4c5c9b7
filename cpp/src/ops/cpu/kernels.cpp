// CPU kernels, compiled once per instruction set (OASIS_ISA names the build) and chosen at start by dispatch.cpp.
//
// No standard-library templates here: an inline function compiled for AVX-512 must never be the copy the linker keeps for all.
// A lane is one output (a column in linear, a query row in attention), so a result has one order of summation whatever the
// vector width, the number of rows or of threads.
#include <math.h>
#include <stdint.h>

#include "oasis/ops.h"

#define OASIS_CAT2(a, b) a##b
#define OASIS_CAT(a, b) OASIS_CAT2(a, b)
#define OASIS_STR2(a) #a
#define OASIS_STR(a) OASIS_STR2(a)

namespace oasis {
namespace OASIS_ISA {

typedef float Vec __attribute__((vector_size(64)));
typedef float VecU __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(64)));

static constexpr int kLanes = 16;
static constexpr int kSplitPages = 32;  // 512 tokens: the fixed split of the keys

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

// ---------------------------------------------------------------- linear
// packed: [panel][k][32]. x is repacked to [tile][k][R], so that the inner loop reads two streams.
// Bytes: the weights once; floor: weights / memory bandwidth at few rows, FMAs at many.

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
static void linear_tile(const float* xt, const float* panel, int64_t k, int64_t n0, int64_t n, const float* bias, float* out) {
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

typedef void (*LinearTile)(const float*, const float*, int64_t, int64_t, int64_t, const float*, float*);

#if defined(__AVX512F__)
static const LinearTile kTiles[] = {nullptr,         linear_tile<1>, linear_tile<2>,  linear_tile<3>,  linear_tile<4>,
                                    linear_tile<5>,  linear_tile<6>, linear_tile<7>,  linear_tile<8>,  linear_tile<9>,
                                    linear_tile<10>, linear_tile<11>, linear_tile<12>};
#else
static const LinearTile kTiles[] = {nullptr, linear_tile<1>, linear_tile<2>, linear_tile<3>, linear_tile<4>};
#endif

void linear(const float* x, int64_t rows, const float* packed, int64_t n, int64_t k, const float* bias, float* out, float* scratch,
            [[maybe_unused]] int num_threads) {
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
        kTiles[r_count](scratch + r0 * k, packed + p * k * kPanel, k, p * kPanel, n, bias, out + r0 * n);
      }
  }
}

// ---------------------------------------------------------------- per-row layers

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

void silu_mul(const float* gate_up, int64_t rows, int64_t inter, float* out, [[maybe_unused]] int num_threads) {
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

// ---------------------------------------------------------------- attention
// Query rows x group are lanes, 16 to a tile; keys run in reading order in fixed splits of 512 tokens, each an online softmax,
// merged in order. Partial of a split: m[16], l[16], acc[D][16].
// Bytes: each page's K and V once per tile; floor: those bytes / memory bandwidth.

struct TileView {
  const AttentionArgs* args;
  const AttentionSegment* seg;
  int head;
  int64_t lane0;  // first lane of the tile; lane = row * G + g
  int lanes;
};

static constexpr int64_t partial_floats(int head_dim) { return (2 + head_dim) * static_cast<int64_t>(kLanes); }

static void load_queries(const TileView& t, float* qt) {
  const AttentionArgs& a = *t.args;
  const float scale = 1.0f / sqrtf(static_cast<float>(a.head_dim));
  for (int i = 0; i < kLanes; ++i) {
    if (i >= t.lanes) {
      for (int d = 0; d < a.head_dim; ++d) qt[d * kLanes + i] = 0.0f;
      continue;
    }
    const int64_t row = (t.lane0 + i) / a.group, g = (t.lane0 + i) % a.group;
    const float* q = t.seg->q + row * a.q_stride + (static_cast<int64_t>(t.head) * a.group + g) * a.head_dim;
    for (int d = 0; d < a.head_dim; ++d) qt[d * kLanes + i] = q[d] * scale;
  }
}

static void attend_split(const TileView& t, const float* qt, int64_t page_begin, int64_t page_end, float* partial) {
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
    const float* keys = a.pool + (static_cast<int64_t>(t.seg->pages[p]) * a.num_kv_heads + t.head) * head_floats;
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
    if ((p + 1) * kBlockTokens > all_see) {
      const int64_t last_row = (t.lane0 + t.lanes - 1) / a.group;
      const int64_t seen = t.seg->visible + last_row - p * kBlockTokens;
      tokens = seen < kBlockTokens ? static_cast<int>(seen) : kBlockTokens;
      for (int j = 0; j < tokens; ++j) s[j] = splat(static_cast<float>(p * kBlockTokens + j)) < visible ? s[j] : splat(-INFINITY);
    }
    Vec top = m;
    for (int j = 0; j < tokens; ++j) top = vmax(top, s[j]);
    const Vec base = top == splat(-INFINITY) ? Vec{} : top;  // a lane that sees nothing of this split yet
    const Vec corr = vexp(m - base);
    l = l * corr;
    for (int j = 0; j < tokens; ++j) {
      s[j] = vexp(s[j] - base);
      l = l + s[j];
    }
    m = top;
    if (tokens == kBlockTokens) {
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
        for (int j = 0; j < tokens; ++j) o = o + s[j] * values[j * dim + d];
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
  for (int d = 2; d < dim + 2; ++d) store(total + d * kLanes, load(total + d * kLanes) * c1 + load(part + d * kLanes) * c2);
}

static void write_out(const TileView& t, const float* total) {
  const AttentionArgs& a = *t.args;
  for (int i = 0; i < t.lanes; ++i) {
    const int64_t row = (t.lane0 + i) / a.group, g = (t.lane0 + i) % a.group;
    float* out = t.seg->out + row * a.out_stride + (static_cast<int64_t>(t.head) * a.group + g) * a.head_dim;
    const float inv = 1.0f / total[kLanes + i];
    for (int d = 0; d < a.head_dim; ++d) out[d] = total[(2 + d) * kLanes + i] * inv;
  }
}

static int64_t tiles_of(const AttentionArgs& a, const AttentionSegment& s) {
  return (static_cast<int64_t>(s.rows) * a.group + kLanes - 1) / kLanes;
}

static TileView tile_view(const AttentionArgs& a, const AttentionSegment& s, int head, int64_t tile) {
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

// A segment of one tile (decode) is spread over (head, split); a larger one (prefill) over (head, tile).
static bool by_split(const AttentionArgs& a, const AttentionSegment& s) { return tiles_of(a, s) == 1; }

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

// ---------------------------------------------------------------- summaries and scores

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
      for (int j = 0; j < kBlockTokens; ++j) half[j / 8] = half[j / 8] + load(keys + j * head_dim + d);
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

void score(SummaryKind kind, const float* q, const float* ab, int64_t blocks, int head_dim, float* out) {
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

extern const Ops table;
const Ops table = {OASIS_STR(OASIS_ISA), pack_weight, linear, rms_norm, silu_mul, rope, attention_scratch,
                   attention, summarize, score, softmax};

}  // namespace OASIS_ISA
}  // namespace oasis
