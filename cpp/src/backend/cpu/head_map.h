// What one KV head of one layer holds: slot -> logical block, and when each slot was last selected.
#pragma once

#include <vector>

#include "oasis/types.h"

namespace oasis::cpu {

class HeadMap {
 public:
  HeadMap(int64_t max_slots, int64_t max_blocks) : slot_of_(max_blocks, Slot()) {
    block_.reserve(max_slots);
    last_.reserve(max_slots);
  }

  int slots() const { return static_cast<int>(block_.size()); }
  LogicalBlock block(Slot s) const { return block_[s.value]; }
  Slot find(LogicalBlock b) const { return slot_of_[b.value]; }

  void touch(Slot s, int64_t step) { last_[s.value] = step; }

  Slot append(LogicalBlock b, int64_t step) {
    block_.push_back(b);
    last_.push_back(step);
    slot_of_[b.value] = Slot(slots() - 1);
    return slot_of_[b.value];
  }

  // Returns the block that had the slot.
  LogicalBlock replace(Slot s, LogicalBlock b, int64_t step) {
    const LogicalBlock old = block_[s.value];
    slot_of_[old.value] = Slot();
    slot_of_[b.value] = s;
    block_[s.value] = b;
    last_[s.value] = step;
    return old;
  }

  // The order of eviction: least recently selected, then the lower block.
  bool evict_before(Slot a, Slot b) const {
    if (last_[a.value] != last_[b.value]) return last_[a.value] < last_[b.value];
    return block_[a.value] < block_[b.value];
  }

  Slot victim() const {
    Slot best(0);
    for (int s = 1; s < slots(); ++s)
      if (evict_before(Slot(s), best)) best = Slot(s);
    return best;
  }

  const std::vector<LogicalBlock>& blocks() const { return block_; }
  const std::vector<int64_t>& last() const { return last_; }

 private:
  std::vector<LogicalBlock> block_;
  std::vector<int64_t> last_;
  std::vector<Slot> slot_of_;
};

}  // namespace oasis::cpu
