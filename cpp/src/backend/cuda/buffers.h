// The memory of the tiers and what the kernels of a step hand to each other, on the device; and the
// pinned host tier. Nothing here is allocated after the start.
#pragma once

#include <algorithm>
#include <memory>

#include "backend/cuda/host_memory.h"
#include "backend/cuda/resources.h"
#include "backend/cuda/step_arrays.h"
#include "backend/cuda/tables.h"
#include "ops/cuda/ops.h"

namespace oasis::cuda {

class Buffers {
 public:
  // cos, sin: float32 [max_seq_len][head_dim / 2] in host memory, copied. lane_tiles: the most that
  // a decode row's request needs.
  Buffers(const CoreConfig& config, const Tables& tables, const StepArrays& arrays, int lane_tiles,
          const float* cos, const float* sin);

  const DType dtype;
  const int element_bytes, head_bytes;  // of an element, of a block-head
  const int64_t pool_layer_bytes;

  // [layer][page][H][K|V][16][D] and [layer][summary page][H][64][2][D].
  char* pool(int layer) const { return pool_.data() + layer * pool_layer_bytes; }
  char* summaries(int layer) const { return summaries_.data() + layer * summary_layer_bytes_; }
  char* host() const { return host_ ? host_->data() : nullptr; }
  const float* cos() const { return cos_.as<float>(); }
  const float* sin() const { return sin_.as<float>(); }

  // Of a layer's foreground: rotated queries [row][Hq][D]; of split attention.
  char* q() const { return q_.data(); }
  float* partials() const { return partials_.as<float>(); }
  int32_t* arrivals() const { return arrivals_.as<int32_t>(); }

  // Of each layer, from the foreground to its background, and within that.
  char* staged(int layer) const { return staged_.data() + layer * staged_layer_bytes_; }
  Copy* copies(int layer) const { return copies_.as<Copy>() + layer * copies_each_; }
  int32_t* num_copies(int layer) const { return num_copies_.as<int32_t>() + layer; }
  int64_t* transferred(int layer) const { return transferred_.as<int64_t>() + layer; }  // flags
  int32_t* gather_arrivals(int layer) const { return gather_arrivals_.as<int32_t>() + layer; }
  float* scores(int parity) const {  // two steps may be under way
    return scores_.as<float>() + parity * scores_each_;
  }

  // Of a whole request that moves between steps: its copies, a list of pages, and of the blocks
  // that are summarised where they come to.
  Copy* moves() const { return moves_.as<Copy>(); }
  int32_t* num_moves() const { return num_moves_.as<int32_t>(); }
  int32_t* move_pages() const { return move_pages_.as<int32_t>(); }
  SettledBlock* moved_blocks() const { return moved_blocks_.as<SettledBlock>(); }

 private:
  int64_t summary_layer_bytes_, staged_layer_bytes_, copies_each_, scores_each_;
  DeviceMemory pool_, summaries_, cos_, sin_;
  std::unique_ptr<HostMemory> host_;
  DeviceMemory q_, partials_, arrivals_, staged_, scores_, copies_, num_copies_, transferred_,
      gather_arrivals_, moves_, num_moves_, move_pages_, moved_blocks_;
};

}  // namespace oasis::cuda
