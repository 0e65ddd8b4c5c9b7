// The kernels of one layer of a step, with their arguments; which stream each runs on, and after
// what, is the caller's.
#pragma once

#include "backend/cuda/buffers.h"

namespace oasis::cuda {

// What launches are made for: the step's own counts, or those of the size that it is captured for.
struct StepSizes {
  int rows = 0, logits_rows = 0, settled = 0, predictors = 0, drafted = 0, score_blocks = 0,
      staged_rows = 0;
  GatherShare share = {};  // its ctas 0: nothing is fetched
};

class LayerKernels {
 public:
  // Gathers at a time: one's end, when its CTAs run dry one by one, is another's middle.
  static constexpr int kGathers = 2;

  LayerKernels(const CoreConfig& config, const Tables& tables, const StepArrays& arrays,
               const Buffers& buffers)
      : config_(config), tables_(tables), arrays_(arrays), buffers_(buffers) {}

  // The step that the calls below are for.
  void set_step(int parity, const StepSizes& sizes, const Cutting& cut);

  void append(int layer, const void* qkv, cudaStream_t stream) const;
  // The summaries of `count` blocks of dense requests, between steps; both lists on the device.
  void summarize(int layer, const SettledBlock* blocks, const int32_t* num_blocks, int count,
                 cudaStream_t stream) const;
  void attend(int layer, void* out, cudaStream_t stream) const;
  void score(int layer, cudaStream_t stream) const;
  void select(int layer, cudaStream_t stream) const;
  // Settled blocks of kWriteLayers layers, at the first of them; nothing at the others.
  void write_through(int layer, cudaStream_t stream) const;
  // Before what the foreground does to kHeldLayers layers, at the first of them: the transfers of
  // the step before.
  void hold(int layer, cudaStream_t stream) const;
  // One of kGathers that may be under way together: its part of the CTAs. Then transferred(layer)
  // is set to the step.
  void gather(int layer, cudaStream_t stream) const;

 private:
  static constexpr int kWriteLayers = 4, kHeldLayers = 4;  // a launch for several

  Heads heads() const { return {config_.num_kv_heads, config_.group(), config_.head_dim}; }
  Settle settle(int layer, const SettledBlock* blocks, const int32_t* num_blocks) const;
  int max_lanes() const { return sizes_.staged_rows * config_.group(); }

  const CoreConfig& config_;
  const Tables& tables_;
  const StepArrays& arrays_;
  const Buffers& buffers_;
  int parity_ = 0;
  StepSizes sizes_;
  Cutting cut_ = {};
};

}  // namespace oasis::cuda
