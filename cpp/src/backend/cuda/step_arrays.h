// A step's metadata: what the kernels of one step read, built on the host and sent in one copy.
//
// Each array has its place, so that a captured launch serves any step; only the part in use is
// sent. Decode steps have an arrangement of their own, without the room that prefill needs. Two
// such buffers take turns, by the parity of the step: the background of one step may still read
// when the next begins.
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
  bool decode;  // no prefill, at most one settled block a request
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
  Segment* segments(int parity) const { return at<Segment>(parity, at_->segments); }
  AttentionSplit* splits(int parity) const { return at<AttentionSplit>(parity, at_->splits); }
  Predictor* predictors(int parity) const { return at<Predictor>(parity, at_->predictors); }
  ScoreSplit* score_splits(int parity) const { return at<ScoreSplit>(parity, at_->score_splits); }
  PrefillTile* prefill_tiles(int parity) const {
    return at<PrefillTile>(parity, at_->prefill_tiles);
  }
  SettledBlock* settled(int parity) const { return at<SettledBlock>(parity, at_->settled); }
  Row* rows(int parity) const { return at<Row>(parity, at_->rows); }
  LogitsRow* logits_rows(int parity) const { return at<LogitsRow>(parity, at_->logits_rows); }
  Drafted* drafted(int parity) const { return at<Drafted>(parity, at_->drafted); }
  // The table rows of those that may have drafts; -1 beyond.
  int32_t* drafted_requests(int parity) const { return at<int32_t>(parity, at_->drafted_requests); }
  int32_t* pages(int parity) const { return at<int32_t>(parity, at_->pages); }

  int64_t max_splits() const { return max_splits_; }
  int64_t max_bytes() const { return whole_.bytes; }

 private:
  // Offsets in bytes.
  struct Places {
    int64_t segments, splits, predictors, score_splits, settled, logits_rows, drafted,
        drafted_requests, rows, prefill_tiles, pages, bytes;
  };
  Places places(int64_t rows, int64_t settled, int64_t prefill_tiles) const;

  template <class T>
  T* at(int parity, int64_t offset) const {
    return reinterpret_cast<T*>(device_.data() + parity * whole_.bytes + offset);
  }
  void add_rows(const StepPlan& plan, const Cutting& cut, Row* rows) const;
  void add_attention(const StepPlan& plan, const Cutting& cut, char* to);
  void add_prediction(const StepPlan& plan, const Cutting& cut, char* to);
  void add_settled(const StepPlan& plan, SettledBlock* settled);
  void add_tokens(const StepPlan& plan, const Cutting& cut, char* to);

  const CoreConfig& config_;
  Counts counts_ = {};
  int64_t max_splits_, max_score_splits_, max_decode_rows_, max_logits_rows_;
  Places decode_, whole_;
  const Places* at_ = &whole_;  // of the step sent last
  DeviceMemory device_;
};

}  // namespace oasis::cuda
