// The CPU backend: the foreground of a step; its background is in background.h.
#pragma once

#include <memory>
#include <vector>

#include "backend/cpu/background.h"

namespace oasis::cpu {

class CpuBackend final : public Backend {
 public:
  // cos, sin: [max_seq_len][head_dim / 2], copied.
  CpuBackend(const CoreConfig& config, const float* cos, const float* sin);
  ~CpuBackend() override;

  void admit(const SequenceKv& seq) override;
  void sparsify(const SequenceKv& seq, int64_t complete, int64_t step) override;
  void save(const SequenceKv& seq) override;
  void restore(const SequenceKv& seq) override;
  void release(const SequenceKv& seq) override;

  void begin(std::shared_ptr<const StepPlan> plan) override;
  void forward(int layer, const void* qkv, void* out) override;
  void abort() override;

  LookaheadStats stats(const SequenceKv& seq, int64_t step) override;
  std::vector<TraceRecord> take_trace() override { return background_->take_trace(); }
  void drain() override;

 private:
  RowData& row(const SequenceKv& seq) { return rows_[seq.row().value]; }
  HeadMap& map(const SequenceKv& seq, int layer, int head) {
    return row(seq).maps[layer * config_.num_kv_heads + head];
  }
  void finish_layers();
  std::vector<std::vector<Fill>> settle(int layer);
  std::vector<Fill> settle_group(const RowGroup& g, int layer);
  void summarize(const SequenceKv& seq, int layer, int head, LogicalBlock block);
  void append_rows(int layer, const float* qkv);
  void attend(int layer, float* out);
  void copy_open_blocks(const SequenceKv& seq, bool to_device);

  const CoreConfig& config_;
  SummaryKind summary_kind_;
  const Ops& ops_;
  Tiers tiers_;
  std::vector<float> cos_, sin_;
  std::vector<RowData> rows_;
  std::unique_ptr<Background> background_;
  int64_t owner_;  // the process whose threads the background has
  std::shared_ptr<const StepPlan> plan_;
  int next_layer_ = 0;
  std::vector<float> q_, scratch_;
};

}  // namespace oasis::cpu
