// The background of a step: predict, select, write through, fetch. One predictor and one transfer
// worker; events per layer.
#pragma once

#include <exception>
#include <memory>
#include <random>
#include <vector>

#include "backend/cpu/event.h"
#include "backend/cpu/row_data.h"
#include "backend/cpu/select.h"
#include "backend/cpu/tiers.h"
#include "backend/cpu/worker.h"
#include "pipeline/step_plan.h"

namespace oasis::cpu {

// What the foreground settled in this layer, one entry a (group, head) of a sparse sequence.
struct Fill {
  Slot slot;
  LogicalBlock evicted;
};

struct LayerJob {
  std::shared_ptr<const StepPlan> plan;
  int layer = 0;
  std::vector<std::vector<Fill>> fills;  // [group][head], empty where nothing was filled
};

class Background {
 public:
  Background(const CoreConfig& config, const Ops& ops, Tiers& tiers, std::vector<RowData>& rows);

  // Where the foreground stages the queries that predict: [staged row][Hq * D]. Free to write after
  // wait_transfer(layer, step - 1).
  float* staged(int layer) { return staged_[layer].data(); }

  void launch(LayerJob job);
  void attended(int layer, int64_t step) { attended_[layer].record(step); }
  void wait_transfer(int layer, int64_t step);  // rethrows what a worker threw
  void wait_step(int64_t step) { wait_transfer(config_.num_layers - 1, step); }
  // The same, whether or not a worker failed: nothing of the step touches its requests any more.
  void wait_done(int64_t step) { transferred_.back().wait(step); }

  void wait_launched() { wait_step(launched_); }

  std::vector<TraceRecord> take_trace();

 private:
  struct Copy {
    HostBlock unit;
    const float* from;
    float* to;
  };

  std::vector<Copy> predict(const LayerJob& job);
  void transfer(const LayerJob& job, const std::vector<Copy>& copies);
  void write_through(const RowGroup& g, int layer, const std::vector<Fill>& fills);
  void delay();
  void guard(const std::function<void()>& work);

  const CoreConfig& config_;
  const Ops& ops_;
  Tiers& tiers_;
  std::vector<RowData>& rows_;
  int64_t launched_ = 0;  // the last step whose last layer is under way
  Scorer scorer_;
  std::mutex trace_mutex_;
  std::vector<TraceRecord> trace_;
  std::vector<std::vector<float>> staged_;
  std::vector<StepEvent> attended_, transferred_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::mt19937_64 delay_rng_;
  Worker transfer_worker_;  // destroyed after the predictor, which feeds it
  Worker predictor_;
};

}  // namespace oasis::cpu
