// What a step decided for one (request, layer, head), for tests and for debugging accuracy. CUDA
// reads it back from the maps: map and last_selected, and of a first selection `predicted` in
// ascending order; the rest is the CPU backend's.
#pragma once

#include <vector>

#include "oasis/types.h"

namespace oasis {

struct Admission {
  LogicalBlock block;
  Slot slot;
  LogicalBlock evicted;
};

struct Selection {
  std::vector<LogicalBlock> predicted;  // in rank order
  std::vector<Admission> admitted;      // in rank order
  int64_t capped = 0;
};

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

}  // namespace oasis
