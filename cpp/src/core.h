// The core's face: scheduler, layers and background. One thread drives it (docs/design.md, section
// 8).
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "pipeline/background.h"
#include "sched/scheduler.h"

namespace oasis {

struct Usage {
  int64_t device_pages, device_pages_free, host_blocks, host_blocks_free, summary_pages,
      summary_pages_free;
  int64_t waiting, prefilling, decoding, preempted;
};

class Core {
 public:
  // cos, sin: [max_seq_len][head_dim / 2], copied.
  Core(CoreConfig config, const float* cos, const float* sin);
  ~Core();

  void check(int64_t prompt_tokens, int64_t max_new_tokens) const {
    scheduler_->check(prompt_tokens, max_new_tokens);
  }
  void submit(RequestId id, int64_t prompt_tokens, int64_t max_new_tokens) {
    scheduler_->submit(id, prompt_tokens, max_new_tokens);
  }
  bool end(RequestId id);
  std::vector<std::pair<RequestId, int>> begin_step();
  std::shared_ptr<const StepPlan> plan(const std::map<RequestId, int>& drafts);
  // qkv: [rows][(Hq + 2H) * D] -> out: [rows][Hq * D], rows in plan order. Layers in order, each
  // once a step.
  void forward(int layer, const float* qkv, float* out);
  void commit(const std::map<RequestId, int>& new_tokens);
  // The caller failed between plan() and commit(): lets the background through and forgets the
  // step. Its requests must be ended.
  void abort_step();

  SequenceStats stats(RequestId id);
  Usage usage();
  void drain() { scheduler_->drain(); }
  std::vector<TraceRecord> take_trace() { return background_->take_trace(); }

 private:
  void finish_layers();
  std::vector<std::vector<Fill>> settle(int layer);
  std::vector<Fill> settle_group(const RowGroup& g, int layer);
  void append_rows(int layer, const float* qkv);
  void attend(int layer, float* out);

  CoreConfig config_;
  SummaryKind summary_kind_;
  const Ops& ops_;
  Pools pools_;
  std::vector<float> cos_, sin_;
  std::unique_ptr<Background> background_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t owner_;                   // the process whose threads the background has
  std::shared_ptr<StepPlan> step_;  // between plan() and commit()
  int next_layer_ = 0;
  std::vector<float> q_, scratch_;
};

}  // namespace oasis
