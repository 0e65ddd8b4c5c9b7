// One request's KV: where its blocks are, on the device and on the host, and how far they are
// settled.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "kv/head_map.h"
#include "kv/pools.h"

namespace oasis {

struct SequenceStats {
  int64_t dense_steps = 0, sparse_steps = 0;
  int64_t predicted = 0, admitted = 0, capped = 0;  // block-heads
  int64_t bytes_fetched = 0;
  int64_t resident_tokens_max = 0;
  int64_t preemptions = 0;
  double stall_ms = 0;
};

class SequenceKv {
 public:
  SequenceKv(const CoreConfig& config, Pools& pools, int64_t max_tokens);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  // Host units and summary pages for the whole life; all or nothing.
  bool reserve();
  bool grow_pages(int64_t total);  // dense: pages for `total` blocks; sparse: `total` slots
  bool in_sparse() const { return sparse_; }
  // Dense: by block; sparse: by slot.
  const std::vector<DevicePage>& pages() const { return pages_; }
  // Sparse, and the block that settles next gets a new slot rather than another's.
  bool grows() const {
    return sparse_ && complete_blocks() > settled &&
           static_cast<int64_t>(pages_.size()) < max_slots_;
  }
  int64_t complete_blocks() const { return committed / kBlockTokens; }
  // The pages that attention reads, in order, for a step whose last position is `last_position`.
  std::vector<int32_t> reading_order(int64_t last_position) const;
  DevicePage page_of_position(int64_t position) const;
  DevicePage page_of_open_block(LogicalBlock b) const;

  float* summary(int layer, int head, LogicalBlock b) const;
  HostBlock host_unit(int layer, LogicalBlock b) const { return host_[b.value * layers_ + layer]; }
  HeadMap& map(int layer, int head) { return maps_[layer * heads_ + head]; }

  // Turns dense into sparse: `chosen[layer * heads + head]` are the blocks to keep. Both local
  // pages must exist: grow_pages first.
  void sparsify(std::vector<std::vector<LogicalBlock>>& chosen, int64_t complete, int64_t step);

  void save_to_host();  // preemption: open blocks and summaries; frees all device memory
  int64_t pages_to_restore() const;
  bool restore_from_host();  // false: not enough pages, nothing changed

  int64_t committed = 0;  // tokens whose KV exists and stays
  int64_t settled = 0;    // complete blocks that are summarised and queued for the host
  SequenceStats stats;

 private:
  struct Saved {
    int64_t pages = 0;
    std::vector<float> open;       // [open page][layer][page floats]
    std::vector<float> summaries;  // [summary page][layer][page floats]
    int64_t summary_pages = 0;
  };

  std::vector<DevicePage> open_pages() const;
  void copy_open_pages(bool to_device);
  void copy_summaries(bool to_device);
  void give_back_device();

  const CoreConfig& config_;
  Pools& pools_;
  int layers_, heads_;
  int64_t max_blocks_, max_slots_;
  bool sparse_ = false;
  std::vector<DevicePage> pages_;
  std::array<DevicePage, 2> local_;
  std::vector<HostBlock> host_;
  std::vector<SummaryPage> summary_pages_;
  std::vector<HeadMap> maps_;
  std::unique_ptr<Saved> saved_;
};

}  // namespace oasis
