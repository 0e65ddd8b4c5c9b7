// A step's metadata: what the kernels of one step read, built on the host and sent in one copy.
//
// Each array has its place for good, so that a captured launch serves any step; only the part in
// use is sent. Two such buffers take turns, by the parity of the step: the background of one step
// may still read when the next begins.
#pragma once

#include <vector>

#include "backend/cuda/resources.h"
#include "backend/cuda/upload_ring.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/prefill.h"
#include "ops/cuda/tokens.h"
#include "ops/cuda/trim.h"
#include "pipeline/step_plan.h"

namespace oasis::cuda {

// How the work of a step is cut, beyond what its plan says.
struct Cutting {
  int attention_ctas, score_ctas;
  int lane_tiles;                  // that attention's units are counted with
  int padded_rows, padded_logits;  // rows beyond the plan's, as padding
};

class StepArrays {
 public:
  explicit StepArrays(const CoreConfig& config);

  // Fills and sends the buffer of the plan's parity.
  void send(const StepPlan& plan, const Cutting& cut, UploadRing& ring);

  struct Counts {
    int64_t step;
    int32_t splits, predictors, score_splits, settled;
    int32_t prefill_tiles, logits_rows, drafted;
  };
  const Counts& counts() const { return counts_; }  // of the step sent last

  // Where they are on the device.
  const int64_t* step(int parity) const { return &at<Counts>(parity, 0)->step; }
  const int32_t* num_splits(int parity) const { return &at<Counts>(parity, 0)->splits; }
  const int32_t* num_predictors(int parity) const { return &at<Counts>(parity, 0)->predictors; }
  const int32_t* num_score_splits(int parity) const { return &at<Counts>(parity, 0)->score_splits; }
  const int32_t* num_drafted(int parity) const { return &at<Counts>(parity, 0)->drafted; }
  const int32_t* num_settled(int parity) const { return &at<Counts>(parity, 0)->settled; }
  Segment* segments(int parity) const { return at<Segment>(parity, segments_at_); }
  AttentionSplit* splits(int parity) const { return at<AttentionSplit>(parity, splits_at_); }
  Predictor* predictors(int parity) const { return at<Predictor>(parity, predictors_at_); }
  ScoreSplit* score_splits(int parity) const { return at<ScoreSplit>(parity, score_splits_at_); }
  PrefillTile* prefill_tiles(int parity) const {
    return at<PrefillTile>(parity, prefill_tiles_at_);
  }
  SettledBlock* settled(int parity) const { return at<SettledBlock>(parity, settled_at_); }
  Row* rows(int parity) const { return at<Row>(parity, rows_at_); }
  LogitsRow* logits_rows(int parity) const { return at<LogitsRow>(parity, logits_rows_at_); }
  Drafted* drafted(int parity) const { return at<Drafted>(parity, drafted_at_); }
  // The table rows of those that may have drafts; -1 beyond.
  int32_t* drafted_requests(int parity) const { return at<int32_t>(parity, drafted_requests_at_); }
  int32_t* pages(int parity) const { return at<int32_t>(parity, pages_at_); }

  int64_t max_logits_rows() const { return max_logits_rows_; }
  int64_t max_splits() const { return max_splits_; }
  int64_t max_settled() const { return max_settled_; }
  int64_t max_bytes() const { return bytes_; }

 private:
  template <class T>
  T* at(int parity, int64_t offset) const {
    return reinterpret_cast<T*>(device_.data() + parity * bytes_ + offset);
  }
  void add_rows(const StepPlan& plan, const Cutting& cut, Row* rows) const;
  void add_attention(const StepPlan& plan, const Cutting& cut, char* to);
  void add_prediction(const StepPlan& plan, const Cutting& cut, char* to);
  void add_settled(const StepPlan& plan, SettledBlock* settled);
  void add_tokens(const StepPlan& plan, const Cutting& cut, char* to);

  const CoreConfig& config_;
  Counts counts_ = {};
  int64_t max_splits_, max_score_splits_, max_settled_, max_prefill_tiles_, max_logits_rows_;
  int64_t segments_at_, splits_at_, predictors_at_, score_splits_at_, prefill_tiles_at_,
      settled_at_, logits_rows_at_, drafted_at_, drafted_requests_at_, rows_at_, pages_at_, bytes_;
  DeviceMemory device_;
};

}  // namespace oasis::cuda
