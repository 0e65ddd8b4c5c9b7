// The table of operations: raw pointers and sizes, one implementation a backend, chosen once at
// start.
//
// All arrays are row-major float32. Every output element is written. A row's result depends on that
// row alone (docs/design.md, section 6): not on the number of rows, on its place among them, or on
// the number of threads.
#pragma once

#include <cstdint>

#include "oasis/config.h"

namespace oasis {

// One sequence's query rows of a step and the pages they read. Row r sees the first `visible + r`
// tokens of the listed pages.
struct AttentionSegment {
  const float* q = nullptr;        // [rows][q_stride], post-RoPE; head h*G+g at offset (h*G+g)*D
  float* out = nullptr;            // [rows][out_stride], the same head order
  const int32_t* pages = nullptr;  // device pages in reading order
  int32_t rows = 0;
  int64_t visible = 0;  // tokens that row 0 sees, at least 1
};

struct AttentionArgs {
  const AttentionSegment* segments = nullptr;
  int32_t num_segments = 0;
  const float* pool = nullptr;  // one layer's pool: [page][kv_head][K|V][16][D]
  int32_t num_kv_heads = 0;
  int32_t group = 0;
  int32_t head_dim = 0;
  int64_t q_stride = 0;
  int64_t out_stride = 0;
  float* scratch = nullptr;  // Ops::attention_scratch floats
  int32_t num_threads = 1;
};

struct Ops {
  const char* isa;

  // Packs [n][k] into panels of 32 output columns; `packed` holds packed_floats(n, k).
  void (*pack_weight)(const float* weight, int64_t n, int64_t k, float* packed);
  // out[rows][n] = x[rows][k] . weight^T (+ bias[n] if not null). scratch: rows * k floats.
  void (*linear)(const float* x, int64_t rows, const float* packed, int64_t n, int64_t k,
                 const float* bias, float* out, float* scratch, int num_threads);
  void (*rms_norm)(const float* x, int64_t rows, int64_t dim, const float* weight, float eps,
                   float* out, int num_threads);
  // out[rows][inter] = silu(gate) * up, with gate_up[rows][2 * inter], gate first.
  void (*silu_mul)(const float* gate_up, int64_t rows, int64_t inter, float* out, int num_threads);
  // Half-split rotary embedding of `heads` heads of one row; cos and sin are that position's
  // [head_dim / 2].
  void (*rope)(const float* x, int heads, int head_dim, const float* cos, const float* sin,
               float* out);

  int64_t (*attention_scratch)(const AttentionArgs&);  // floats that args.scratch must hold
  void (*attention)(const AttentionArgs&);

  // keys[16][D] -> ab[2][D].
  void (*summarize)(SummaryKind kind, const float* keys, int head_dim, float* ab);
  // Scores of `blocks` consecutive summaries ab[block][2][D] for one query: out[block].
  void (*score)(SummaryKind kind, const float* q, const float* ab, int64_t blocks, int head_dim,
                float* out);
  // In place: x[n] -> softmax(x * scale). The sum runs in block order, lane by lane.
  void (*softmax)(float* x, int64_t n, float scale);
};

inline constexpr int kPanel = 32;
constexpr int64_t packed_floats(int64_t n, int64_t k) { return div_up(n, kPanel) * kPanel * k; }

const Ops& cpu_ops();

}  // namespace oasis
