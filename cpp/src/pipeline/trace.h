// What a step decided for one (request, layer, head), for tests and for debugging accuracy.
#pragma once

#include <mutex>
#include <vector>

#include "lookahead/select.h"

namespace oasis {

struct TraceRecord {
  int64_t step = 0;
  RequestId id = 0;
  int layer = 0, head = 0;
  bool first = false;  // the uncapped selection of the last dense step
  bool filled = false;
  Slot fill_slot;
  LogicalBlock fill_evicted;
  Selection selection;
  // Block of each slot, after the selection; empty for a first selection.
  std::vector<LogicalBlock> map;
  std::vector<int64_t> last_selected;
};

class Trace {
 public:
  void add(TraceRecord r) {
    std::lock_guard lock(mutex_);
    records_.push_back(std::move(r));
  }
  std::vector<TraceRecord> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<TraceRecord> records_;
};

}  // namespace oasis
