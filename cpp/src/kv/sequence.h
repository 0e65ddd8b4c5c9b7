// One request's KV as ids and lengths: where its blocks are, on the device and on the host, and how
// far they are settled. What lies there is the backend's.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "kv/pools.h"

namespace oasis {

struct SequenceStats {
  int64_t dense_steps = 0, sparse_steps = 0;
  int64_t resident_tokens_max = 0;
  int64_t preemptions = 0;
  int64_t kv_blocks = 0;         // that its KV is in
  int64_t kv_blocks_reused = 0;  // of them, that it found cached
};

class SequenceKv {
 public:
  SequenceKv(const CoreConfig& config, Pools& pools, int64_t max_tokens);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  // Pages for `blocks`; and for the whole life a table row, host units and summary pages. All or
  // nothing. `names`: of its first complete blocks. Of these it begins with the longest run that is
  // kept, `most_reused` blocks at most: they are committed and settled, on the host alone.
  bool reserve(int64_t blocks, const std::vector<BlockName>& names, int64_t most_reused);
  bool grow_pages(int64_t total);  // dense: pages for `total` blocks; sparse: `total` slots
  bool in_sparse() const { return sparse_; }
  TableRow row() const { return row_; }
  int64_t max_blocks() const { return max_blocks_; }
  // Dense: by block; sparse: by slot.
  const std::vector<DevicePage>& pages() const { return pages_; }
  const std::vector<SummaryPage>& summary_pages() const { return summary_pages_; }
  HostBlock host_unit(int layer, LogicalBlock b) const { return host_[b.value * layers_ + layer]; }
  const std::vector<HostBlock>& host_units() const { return host_; }  // [block][layer]
  // Names of more of its complete blocks than it had.
  void name_more(std::vector<BlockName> names) { names_ = std::move(names); }
  int64_t named_blocks() const { return static_cast<int64_t>(names_.size()); }
  // Blocks [from, to), as far as they have names and are exact, are final in their host units or
  // will be before anything that comes later: whoever has the same names may use them.
  void keep(int64_t from, int64_t to);
  // Nobody may use its blocks any more who does not yet; it keeps no more of them.
  void forget();
  // Sparse: slots that hold a block.
  int64_t used_slots() const { return std::min(max_slots_, settled); }
  // Sparse, and the block that settles next gets a new slot rather than another's. Its page may be
  // there already: of a step that did not come to run.
  bool grows() const { return sparse_ && complete_blocks() > settled && settled < max_slots_; }
  int64_t complete_blocks() const { return committed / kBlockTokens; }
  // The pages that attention reads, in order, for a step whose last position is `last_position`.
  std::vector<int32_t> reading_order(int64_t last_position) const;
  DevicePage page_of_position(int64_t position) const {
    return page_of_open_block(LogicalBlock(position / kBlockTokens));
  }
  DevicePage page_of_open_block(LogicalBlock b) const {
    return sparse_ ? local_[b.value % kLocalPages] : pages_[b.value];
  }
  // Blocks with tokens that are not on the host yet: [settled, end).
  int64_t open_blocks_end() const { return blocks_for(committed); }

  // Slots that a sparse life begins with, when `complete` blocks were there to choose from.
  int64_t first_slots(int64_t complete) const { return std::min(max_slots_, complete); }
  // The pages of blocks 0..first_slots - 1 become the slots, those of the next kLocalPages
  // blocks the local pages, which must exist (grow_pages first); the others go back.
  void turn_sparse(int64_t complete);

  // Preemption: its pages go. Its row and summaries stay: there are enough for all that have host
  // units.
  void give_back_pages();
  int64_t pages_to_restore() const;  // that it had then
  bool take_pages_back();            // false: there are too few, nothing changed

  int64_t committed = 0;  // tokens whose KV exists and stays
  // Of these, the first ones that were computed by attention over all tokens. Only their blocks are
  // kept: whoever computes the others in its prompt gets other values than sparse steps do.
  int64_t exact = 0;
  int64_t settled = 0;  // complete blocks that are summarised and queued for the host
  SequenceStats stats;
  std::pair<SequenceStats, int64_t>
      stats_before;  // before its last decode step, and which that was

 private:
  std::span<const HostBlock> units(int64_t block) const {
    return std::span(host_).subspan(block * layers_, layers_);
  }

  Pools& pools_;
  int layers_;
  int64_t max_blocks_, max_slots_, max_summary_pages_, max_host_blocks_;
  bool sparse_ = false;
  TableRow row_;
  std::vector<DevicePage> pages_;
  std::array<DevicePage, kLocalPages> local_;
  std::vector<HostBlock> host_;
  std::vector<BlockName> names_;  // of its first complete blocks, so far
  // By block, of the first ones: kept under its name, by whomever first; else its units are its
  // own.
  std::vector<std::optional<HostPool::Handle>> kept_;
  std::vector<SummaryPage> summary_pages_;
  int64_t given_back_ = 0;  // pages but the local ones
};

}  // namespace oasis
