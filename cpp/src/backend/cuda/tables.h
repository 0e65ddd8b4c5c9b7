// What the device knows of each request, by its table row. The scheduler owns the ids; these are
// the kernels' copies, and the maps, which only the kernels change.
#pragma once

#include "backend/cuda/resources.h"
#include "oasis/config.h"

namespace oasis::cuda {

class Tables {
 public:
  explicit Tables(const CoreConfig& c)
      : max_blocks(blocks_for(c.max_seq_len)),
        summary_stride(div_up(max_blocks, kSummaryBlocks)),
        top_k(c.top_k_blocks),
        layers_(c.num_layers),
        heads_(c.num_kv_heads),
        layer_maps_(int64_t{c.max_batch_size} * heads_ * top_k),
        host_units_(4 * c.max_batch_size * max_blocks * layers_, "table of host units"),
        summary_pages_(4 * c.max_batch_size * summary_stride, "table of summary pages"),
        slot_pages_(4ll * c.max_batch_size * top_k, "table of slots"),
        slot_blocks_(4 * layer_maps_ * layers_, "maps"),
        slot_steps_(4 * layer_maps_ * layers_, "maps"),
        first_choice_(4 * layer_maps_ * layers_, "first selections"),
        stats_(8ll * kStats * c.max_batch_size, "statistics") {}

  static constexpr int kStats = 4;  // as Select writes them

  const int64_t max_blocks, summary_stride;  // of a request
  const int top_k;

  int64_t host_stride() const { return max_blocks * layers_; }
  int32_t* host_units() const { return host_units_.as<int32_t>(); }
  int32_t* host_units(TableRow r) const { return host_units() + r.value * host_stride(); }
  int32_t* summary_pages() const { return summary_pages_.as<int32_t>(); }
  int32_t* summary_pages(TableRow r) const { return summary_pages() + r.value * summary_stride; }
  int32_t* slot_pages() const { return slot_pages_.as<int32_t>(); }
  int32_t* slot_pages(TableRow r) const { return slot_pages() + int64_t{r.value} * top_k; }
  // [row][head][slot] of a layer.
  int32_t* slot_blocks(int layer) const { return slot_blocks_.as<int32_t>() + layer * layer_maps_; }
  int32_t* slot_steps(int layer) const { return slot_steps_.as<int32_t>() + layer * layer_maps_; }
  int32_t* first_choice(int layer) const {
    return first_choice_.as<int32_t>() + layer * layer_maps_;
  }
  int64_t layer_maps() const { return layer_maps_; }  // entries of a layer
  int64_t map_of(TableRow r) const { return int64_t{r.value} * heads_ * top_k; }
  int64_t* stats() const { return stats_.as<int64_t>(); }

 private:
  int64_t layers_, heads_, layer_maps_;
  DeviceMemory host_units_, summary_pages_, slot_pages_, slot_blocks_, slot_steps_, first_choice_,
      stats_;
};

}  // namespace oasis::cuda
