// The CUDA backend. Every call enqueues; the order of streams, events and flags keeps them apart:
// - foreground: what the caller's layers run on too; sparsify, save, restore and uploads.
// - predict: write-through, score and select of each layer, after staged(layer).
// - transfers: gather of each layer, after those and attended(layer), in the order of the steps;
//   two, which layers take in turn.
// In eager steps the gather, which needs few SMs, does not wait for them, and scoring takes what
// the foreground leaves; graphs keep no priorities.
//
// A step runs eagerly, or as one graph of all that is captured between begin_capture and
// end_capture. What steps wait for of one another: the flags transferred(layer), in device memory,
// and as external events the statistics, and the end of the foreground, after which the foreground
// stream goes on while the graph's background still runs. Graphs take turns on two streams, by the
// parity of the step.
//
// The foreground waits for transferred(layer, t - 1) before it touches layer `layer` in step t, and
// for all of step t - 1 (join) before it touches what all layers share: tables and whole requests.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/layer_kernels.h"
#include "backend/cuda/step_graphs.h"
#include "backend/cuda/upload_ring.h"
#include "pipeline/backend.h"

namespace oasis::cuda {

class CudaBackend final : public Backend {
 public:
  // cos, sin: float32 [max_seq_len][head_dim / 2] in host memory, copied.
  CudaBackend(const CoreConfig& config, const float* cos, const float* sin);
  ~CudaBackend() override;

  void admit(const SequenceKv& seq) override;
  void sparsify(const SequenceKv& seq, int64_t complete, int64_t step) override;
  void save(const SequenceKv& seq) override;
  void restore(const SequenceKv& seq) override;
  void release(const SequenceKv&) override {}  // whoever takes its ids comes later in the streams

  void begin(std::shared_ptr<const StepPlan> plan) override;
  // out null: rows are appended and predict, nothing attends (benchmarks that fill the cache).
  void forward(int layer, const void* qkv, void* out) override;
  void abort() override;

  LookaheadStats stats(const SequenceKv& seq, int64_t step) override;
  std::vector<TraceRecord> take_trace() override { return std::exchange(trace_, {}); }
  void drain() override;

  // In place of config.gather_shares, for measurements. Steps are captured anew.
  void share_sms(std::vector<GatherShare> shares);
  cudaStream_t foreground() const { return foreground_; }
  // What the caller's part of a step reads, for the step at hand; addresses on the device.
  struct StepView {
    int rows, logits_rows, drafted;  // to launch for: padding included
    bool captured;                   // launch() it; else enqueue it on foreground()
    bool capture;                    // between begin_capture() and end_capture(), then launch() it
    bool bucketed;                   // of one of few sizes
    GatherShare share;               // ctas 0: it fetches nothing
    const Row* row_list;
    const LogitsRow* logits_row_list;
    const int32_t* drafted_requests;  // table rows, -1: padding
  };
  // variant: what else the caller's part depends on; each has graphs of its own. kEager: the step
  // is enqueued, whatever its size.
  static constexpr int kEager = -1;
  StepView view(int variant);
  // After the device's drafter: leaves out drafts that are not there. used[i]: of the i-th request
  // with drafts.
  void trim(const int32_t* draft_counts, int32_t* used);
  int captured_steps() const;  // graphs that there are now
  void begin_capture();
  bool end_capture();  // false: there is no memory for the graph, enqueue the step after all
  void launch();
  // The caller's part of a step that ran eagerly is enqueued.
  void mark_foreground();
  // Until it is done, of either kind of step.
  void wait_foreground(int64_t step) const;

 private:
  struct LayerEvents {
    Event staged, predicted, attended;
  };
  static int parity_of(int64_t step) { return static_cast<int>(step & 1); }
  Heads heads() const { return {config_.num_kv_heads, config_.group(), config_.head_dim}; }
  LayerEvents& events(int layer, int64_t step) { return events_[2 * layer + (step & 1)]; }
  bool background() const { return config_.host_blocks > 0; }  // else nothing leaves the device
  void use_device();
  void join();
  void move_blocks(const SequenceKv& seq, bool to_device, int count, const int32_t* pages,
                   const int32_t* blocks, int64_t first_block);
  void bring_reused_blocks(const SequenceKv& seq);
  void move_open_blocks(const SequenceKv& seq, bool to_device);
  void predict(int layer);
  void transfer(int layer);
  void count_selections();
  void plan_sizes();
  void drop_oldest_graph();
  const GatherShare& share_for(int64_t requests) const;
  void end_layers();
  void trace_step();

  const CoreConfig& config_;
  const int device_, sms_;
  std::vector<GatherShare> gather_shares_;
  const int max_select_blocks_;
  Stream foreground_{Priority::kMiddle}, predict_{Priority::kLow};
  std::array<Stream, LayerKernels::kGathers> transfers_{Stream(Priority::kHigh),
                                                        Stream(Priority::kHigh)};
  std::array<Stream, 2> graph_streams_{Stream(Priority::kMiddle), Stream(Priority::kMiddle)};
  std::vector<LayerEvents> events_;  // [layer][parity of the step]
  std::array<Event, 2> foreground_done_, counted_;
  Event ready_, counted_in_, moved_in_;  // around and within a captured step
  std::map<StepSize, StepGraphs> graphs_;

  Tables tables_;
  StepArrays arrays_;
  Buffers buffers_;
  LayerKernels kernels_;
  UploadRing ring_;
  PinnedMemory stats_;  // [parity][row][kStats], as of the step
  Cutting cut_ = {};
  StepSizes sizes_;
  std::optional<StepSize> size_;  // of the step at hand, if it may be captured
  StepGraphs* graph_ = nullptr;   // that the caller has asked for by view()
  bool capturing_ = false;

  std::shared_ptr<const StepPlan> plan_;
  int64_t last_step_ = 0;
  int parity_ = 0;
  int next_layer_ = 0;
  std::vector<TraceRecord> trace_;
};

}  // namespace oasis::cuda
