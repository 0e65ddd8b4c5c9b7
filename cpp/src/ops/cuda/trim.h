// A step is planned with as many drafts a request as it may use; how many there are, only the
// device knows when its drafter runs there.
#pragma once

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// A request that may have drafts in this step, in a device array.
struct Drafted {
  int32_t request;    // its row in the token tables
  int32_t row0;       // its normal row; its draft rows follow
  int32_t drafts;     // planned
  int32_t segment;    // of attention
  int32_t predictor;  // -1: none
  int32_t staged0;
};

struct Trim {
  const Drafted* drafted;
  const int32_t* num_drafted;
  const int32_t* draft_counts;  // [request]: drafts there are
  int32_t* used;                // [drafted]: of those planned
  Row* rows;
  Segment* segments;
  Predictor* predictors;
};
// Rows of drafts that are not there become padding; with no draft the normal row predicts.
void trim(const Trim& t, int max_drafted, cudaStream_t stream);

}  // namespace oasis::cuda
