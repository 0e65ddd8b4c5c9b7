// What the CPU backend keeps for a request, by its table row.
#pragma once

#include <vector>

#include "backend/cpu/head_map.h"
#include "pipeline/backend.h"

namespace oasis::cpu {

struct RowData {
  int64_t last_step = 0;      // the last step that names it
  std::vector<HeadMap> maps;  // sparse: [layer * heads + head]
  // What it selected first, [layer * heads + head], until it turns sparse.
  std::vector<std::vector<LogicalBlock>> first_choice;
  LookaheadStats stats;
};

}  // namespace oasis::cpu
