// One step, fixed before its first layer: which rows of which request, what they read, and what is
// predicted from them.
#pragma once

#include <memory>
#include <vector>

#include "kv/sequence.h"

namespace oasis {

enum class RowKind { kPrefill, kDense, kSparse };

// A plan's rows of one request: `rows` consecutive positions from `start`. A decode group is one
// normal row and `drafts` draft rows.
struct RowGroup {
  RequestId id = 0;
  RowKind kind = RowKind::kPrefill;
  int64_t start = 0;
  int rows = 0;
  int drafts = 0;
  int logits_rows = 0;  // rows whose logits the caller needs: prefill's last row, or the first ones
                        // of a decode group

  const SequenceKv* seq = nullptr;  // released before it goes
  int64_t row0 = 0;                 // first row in the step's packed arrays
  std::vector<int32_t> pages;       // reading order
  int64_t visible = 0;              // tokens that row 0 sees
  int64_t settle_from = 0, settle_to = 0;
  bool grows = false;     // sparse, and the block that settles gets a new slot
  bool predicts = false;  // sparse, or dense and selecting first
  int64_t staged0 = 0;    // first row in the staged queries
  int staged_rows = 0;

  int first_staged_row() const { return drafts > 0 ? 1 : 0; }
};

struct StepPlan {
  int64_t step = 0;
  std::vector<RowGroup> groups;
  int64_t rows = 0;
  int64_t staged_rows = 0;
};

}  // namespace oasis
