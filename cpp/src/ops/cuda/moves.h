// Moves of a request's whole working set, between steps: when it turns sparse, and when it resumes.
#pragma once

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// One request turns sparse by its first selection: what was chosen of blocks below `slots` stays in
// the page of its block, the rest is copied into the pages left over, both in ascending order. All
// layers in one launch.
struct Sparsify {
  Heads heads;
  int layers, element_bytes;
  int slots;             // the working set begins with so many
  int64_t step;          // of the selection
  const int32_t* pages;  // device pages of its dense life, by block
  // The request's part of each layer's map, a layer every `map_stride` entries: [head][top_k].
  const int32_t* first_choice;
  int32_t *slot_blocks, *slot_steps;
  int64_t map_stride;
  int top_k;
  void* pool;  // [layer][page][H][K|V][16][D]
  int64_t layer_bytes;
};
void sparsify(const Sparsify& s, cudaStream_t stream);
inline constexpr int kMostSlots = 12288;  // that it serves

// Lists the copies that bring `count` blocks of one request from their host units into device
// pages, in all layers and heads.
struct ListCopies {
  Heads heads;
  int layers, element_bytes;
  int count;
  const int32_t* pages;   // [count]
  const int32_t* blocks;  // [layer][head][top_k] as in Sparsify, or null: first_block, + 1, ...
  int first_block;
  int64_t map_stride;
  int top_k;
  const int32_t* host_units;  // of the request: [block][layer]
  const void* host_base;
  void* pool;
  int64_t layer_bytes;
  bool to_device;  // else the other way round
  Copy* copies;    // layers * H * count
};
void list_copies(const ListCopies& l, cudaStream_t stream);

}  // namespace oasis::cuda
