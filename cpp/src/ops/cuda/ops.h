// The CUDA kernels' host entry points: raw device pointers, sizes, a stream. Each only enqueues; a
// launch that CUDA refuses throws std::runtime_error. Layouts are those of docs/design.md, section
// 2, in T = dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "oasis/config.h"
#include "ops/cuda/flags.h"

namespace oasis::cuda {

// The shape of one layer's heads.
struct Heads {
  int num_kv_heads, group, head_dim;
};

// A step's rows of one request, in a device array.
struct Segment {
  int32_t row0, rows;         // its rows in q and out; causal among themselves
  int32_t pages0, num_pages;  // its part of the step's page list, in reading order
  int32_t visible;            // tokens that its first row sees
};

// Some pages of one segment: the unit of attention's work. A segment's splits are adjacent in the
// list. How many pages is the caller's choice (split.h); fixed runs make a row's result independent
// of its batch.
struct AttentionSplit {
  int32_t segment;
  int32_t page_begin, page_end;  // within the segment's list
  int32_t index, count;          // which of the segment's splits, and how many there are
};
inline constexpr int kLaneTile = 16;  // query rows x group that one pass over the keys serves

// In 16 bit, for decode rows. In float32 for decode rows and prefill chunks: one CTA takes all
// pages of a (segment, head, lane tile), so that a row's result depends on its query, its pages and
// what it sees alone. Of a segment's splits the first (index 0) then stands for it and the others
// are passed over, whatever their pages; partials and arrivals are not used; a CTA fills its SM.
struct Attention {
  DType dtype;
  Heads heads;
  const void *q, *pool;  // q [rows][Hq][D]; pool: one layer, [page][H][K|V][16][D]
  void* out;             // [rows][Hq][D]
  const Segment* segments;
  const int32_t* pages;
  const AttentionSplit* splits;
  const int32_t* num_splits;  // on the device: a captured launch serves any number
  int max_lane_tiles;         // most tiles of kLaneTile that a segment's rows x group need
  float* partials;            // attention_partial_floats() for each (split, head, lane tile)
  int32_t* arrivals;          // [split][head][lane tile], zero; left zero
  int num_ctas;               // the grid: SMs to use x CTAs an SM
};
int64_t attention_partial_floats(int head_dim);
int attention_ctas_per_sm();
void attention(const Attention& a, cudaStream_t stream);

// A request that predicts in this step, in a device array.
struct Predictor {
  int32_t request;               // its row in the tables below
  int32_t staged0, staged_rows;  // its queries in the staging buffer
  int32_t blocks;                // complete blocks: those that are scored
  int32_t slots;                 // of its working set; 0 for a first selection
  int32_t scores0;               // its part of the scores: [head][lane][stride]
  int32_t stride;                // blocks rounded up to 32
};

// Some blocks of one predictor, from a multiple of 16: the unit of scoring's work.
struct ScoreSplit {
  int32_t predictor, block_begin, block_end;
};

// In float32 a score depends on its query and its block alone, whatever the splits.
struct Score {
  DType dtype;
  Heads heads;
  SummaryKind kind;
  const void *staged,
      *summaries;  // staged [row][Hq][D]; summaries: one layer, [page][H][64 blocks][2][D]
  const Predictor* predictors;
  const int32_t* summary_pages;  // [request][summary_stride]
  int summary_stride;
  const ScoreSplit* splits;
  const int32_t* num_splits;
  int max_lane_tiles;
  float* scores;  // each lane's: q.a + |q|.b and the like, docs/design.md, section 5
  int num_ctas;
};
int score_ctas_per_sm();
void score(const Score& s, cudaStream_t stream);

// A copy of one block-head, either way over the link.
struct Copy {
  const void* from;
  void* to;
};

struct Select {
  Heads heads;
  GroupCombine combine;
  int top_k, fetch_cap, sink_blocks, element_bytes;
  float* scores;  // as score leaves them; what lies beyond a lane's blocks may be overwritten
  const Predictor* predictors;
  const int32_t* num_predictors;
  // The grid and the shared memory: a captured launch serves any number up to these. Lanes: staged
  // rows x group.
  int max_predictors, max_blocks, max_lanes;
  const int64_t* step;
  int32_t* slot_blocks;   // [request][H][top_k]: the block in each slot
  int32_t* slot_steps;    // [request][H][top_k]: when it was last selected
  int32_t* first_choice;  // [request][H][top_k]: a first selection, ascending, -1 beyond its end
  const int32_t* slot_pages;  // [request][slot_stride]
  int slot_stride;
  const int32_t*
      host_units;  // [request][host_stride]; unit of block b: at b * host_step + host_offset
  int64_t host_stride;
  int host_step, host_offset;
  const void* host_base;
  void* pool;           // one layer
  Copy* copies;         // room for max_predictors * H * fetch_cap
  int32_t* num_copies;  // zero; counts up
  int64_t* stats;       // [request][4]: block-heads predicted, admitted, capped; ns waited
};
void select(const Select& s, cudaStream_t stream);
// The most blocks that select serves with this top_k and so many lanes.
int select_max_blocks(int top_k, int max_lanes);

// Moves block-heads of `bytes` each over the link: `num_ctas` single-warp CTAs, bulk copies through
// shared memory, `in_flight` (2, 4, 6 or 8) runs of at most 8 KiB under way in each.
void gather(const Copy* copies, const int32_t* num_copies, int bytes, int num_ctas, int in_flight,
            const DoneFlag& done, cudaStream_t stream);

// A row of the step, in a device array.
struct Row {
  int32_t position;  // -1: padding, skipped
  int32_t page;      // the device page of its block
  int32_t staged;    // where its query goes in the staging buffer; -1: nowhere
  int32_t request;   // whose it is: a row of the token tables (tokens.h)
  int32_t draft;     // 0: the token known at `position`; i: the request's draft i - 1
};

struct Append {
  DType dtype;
  Heads heads;
  const void* qkv;  // [row][(Hq + 2 H) * D], before RoPE
  const Row* rows;
  const float *cos, *sin;       // [position][D / 2]
  const void *q_norm, *k_norm;  // [D] weights of a norm a head, or null
  float norm_eps;
  void *q, *staged, *pool;  // q [row][Hq][D]; pool: one layer
  int32_t* num_copies;      // set to zero for the selection that comes next
};

// A block that is complete since the last step, in a device array.
struct SettledBlock {
  int32_t request, block;
  int32_t page;   // that holds it, and goes on doing so in this step
  int32_t slots;  // in use before; -1: its request is dense
  int32_t grows;  // whether it gets a new slot
};

struct Settle {
  SummaryKind kind;
  int top_k;
  const SettledBlock* blocks;
  const int32_t* num_blocks;
  void* summaries;  // one layer
  const int32_t* summary_pages;
  int summary_stride;
  int32_t *slot_blocks, *slot_steps;  // as in Select
  const int32_t* slot_pages;
  int slot_stride;
  const int64_t* step;
};

// Both at once: a row never goes to the page of a block that settles in the same step.
void append(const Append& a, int rows, const Settle& s, int max_blocks, cudaStream_t stream);

// Settled blocks to the host, of `layers` layers at once.
struct WriteThrough {
  Heads heads;
  int element_bytes, layers;
  const SettledBlock* blocks;
  const int32_t* num_blocks;
  const void* pool;  // the first of the layers
  int64_t layer_bytes;
  const int32_t* host_units;  // as in Select; host_offset: of the first layer
  int64_t host_stride;
  int host_step, host_offset;
  void* host_base;
};
void write_through(const WriteThrough& w, int num_ctas, cudaStream_t stream);

// residual += x, rounded to dtype (or left alone: null), then y = residual / rms(residual) *
// weight; [row][dim] each.
void add_rms_norm(DType dtype, const void* x, void* residual, const void* weight, void* y,
                  int64_t rows, int dim, float eps, cudaStream_t stream);
// gate_up [row][2 * inter], gate first -> y [row][inter] = silu(gate) * up
void silu_mul(DType dtype, const void* gate_up, void* y, int64_t rows, int inter,
              cudaStream_t stream);

// Reads `bytes` once; `out` is one int, which it hardly ever writes.
void read(const void* from, int64_t bytes, int* out, int num_ctas, cudaStream_t stream);

}  // namespace oasis::cuda
