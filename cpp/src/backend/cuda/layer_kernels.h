// The kernels of one layer of a step, with their arguments; which stream each runs on, and after
// what, is the caller's.
#pragma once

#include "backend/cuda/buffers.h"

namespace oasis::cuda {

// What launches are made for: the step's own counts, or those of the size that it is captured for.
struct StepSizes {
  int rows = 0, logits_rows = 0, settled = 0, predictors = 0, drafted = 0, score_blocks = 0,
      staged_rows = 0;
  int gather_ctas = 0;  // 0: nothing is fetched
};

class LayerKernels {
 public:
  LayerKernels(const CoreConfig& config, const Tables& tables, const StepArrays& arrays,
               const Buffers& buffers)
      : config_(config), tables_(tables), arrays_(arrays), buffers_(buffers) {}

  // The step that the calls below are for.
  void set_step(int parity, const StepSizes& sizes, const Cutting& cut);

  void append(int layer, const void* qkv, cudaStream_t stream) const;
  void attend(int layer, void* out, cudaStream_t stream) const;
  void score(int layer, cudaStream_t stream) const;
  void select(int layer, cudaStream_t stream) const;
  // Settled blocks of kWriteLayers layers, at the first of them; nothing at the others.
  void write_through(int layer, cudaStream_t stream) const;
  void gather(int layer, cudaStream_t stream) const;

 private:
  static constexpr int kWriteLayers = 4;  // each launch costs the host 2 us

  Heads heads() const { return {config_.num_kv_heads, config_.group(), config_.head_dim}; }
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
