// The core's face: a scheduler and a backend. One thread drives it (docs/design.md, section 8).
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "pipeline/backend.h"
#include "sched/scheduler.h"

namespace oasis {

namespace cuda {
class CudaBackend;
}

struct Usage {
  int64_t device_pages, device_pages_free, host_blocks, host_blocks_free, summary_pages,
      summary_pages_free;
  int64_t waiting, prefilling, decoding, preempted;
  int64_t prefix_blocks_cached, prefix_blocks_reused, prefix_blocks_evicted;
};

struct RequestStats {
  SequenceStats sequence;
  LookaheadStats lookahead;
};

class Core {
 public:
  // cos, sin: float32 [max_seq_len][head_dim / 2], copied.
  Core(CoreConfig config, const float* cos, const float* sin);
  ~Core();

  void check(int64_t prompt_tokens, int64_t max_new_tokens) const {
    scheduler_->check(prompt_tokens, max_new_tokens);
  }
  void submit(RequestId id, int64_t prompt_tokens, int64_t max_new_tokens,
              std::vector<BlockName> names = {}) {
    scheduler_->submit(id, prompt_tokens, max_new_tokens, std::move(names));
  }
  bool end(RequestId id, std::vector<BlockName> names = {});
  void forget(RequestId id) { scheduler_->forget(id); }
  std::vector<std::pair<RequestId, int>> begin_step();
  std::shared_ptr<const StepPlan> plan(const std::map<RequestId, int>& drafts);
  // qkv: [rows][(Hq + 2H) * D] -> out: [rows][Hq * D], in config.dtype, in the backend's memory,
  // rows in plan order. Layers in order, each once a step.
  void forward(int layer, const void* qkv, void* out);
  void commit(const std::map<RequestId, int>& new_tokens);
  // The caller failed between plan() and commit(): lets the background through and forgets the
  // step. Its requests must be ended.
  void abort_step();

  // As of `step`, one of the last two; 0: the last.
  RequestStats stats(RequestId id, int64_t step);
#ifdef OASIS_CUDA
  cuda::CudaBackend& cuda();  // throws std::logic_error on another backend
  // Captures the caller's layers in between: forward() of each, on the backend's stream. The step
  // has not run then.
  void begin_capture();
  bool end_capture();  // false: it could not be made, forward() each layer after all
  void launch();       // runs the captured step, in place of forward()
#endif
  Usage usage();
  int64_t last_step() const { return last_step_; }  // the last that was planned; 0: none
  void drain() { backend_->drain(); }
  std::vector<TraceRecord> take_trace() { return backend_->take_trace(); }

 private:
  CoreConfig config_;
  Pools pools_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Scheduler> scheduler_;
  std::shared_ptr<StepPlan> step_;  // between plan() and commit()
  int64_t last_step_ = 0;
  int next_layer_ = 0;
  bool ran_ = false;  // something of the step
};

}  // namespace oasis
