#include "backend/cpu/cpu_backend.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace oasis::cpu {

CpuBackend::CpuBackend(const CoreConfig& config, const float* cos, const float* sin)
    : config_(config),
      summary_kind_(summary_kind_from(config_.summary)),
      ops_(cpu_ops()),
      tiers_(config_),
      cos_(cos, cos + config_.max_seq_len * config_.head_dim / 2),
      sin_(sin, sin + config_.max_seq_len * config_.head_dim / 2),
      rows_(config_.max_batch_size),
      background_(std::make_unique<Background>(config_, ops_, tiers_, rows_)),
      owner_(getpid()),
      q_(static_cast<int64_t>(config_.max_num_tokens) * config_.num_q_heads * config_.head_dim) {}

CpuBackend::~CpuBackend() {
  if (getpid() != owner_) {
    // A forked child: waiting for workers that it does not have would never end.
    background_.release();
    return;
  }
  if (plan_) finish_layers();
}

// ------------------------------------------------------------ a request's life

void CpuBackend::admit(const SequenceKv& seq) {
  const std::vector<HostBlock>& units = seq.host_units();
  for (size_t i = seq.settled * config_.num_layers; i < units.size(); ++i)
    tiers_.host.mark_incomplete(units[i]);
  row(seq) = RowData();
  if (seq.settled == 0) return;
  background_->wait_launched();  // it may still be writing the units that were kept last
  restore(seq);
  if (!config_.sparse_enabled) return;
  for (int l = 0; l < config_.num_layers; ++l)
    for (int h = 0; h < config_.num_kv_heads; ++h)
      for (int64_t b = 0; b < seq.settled; ++b) summarize(seq, l, h, LogicalBlock(b));
}

void CpuBackend::sparsify(const SequenceKv& seq, int64_t complete, int64_t step) {
  RowData& data = row(seq);
  background_->wait_step(data.last_step);
  const int64_t slots = seq.first_slots(complete);
  const size_t bytes = config_.block_head_elements() * sizeof(float);
  const int heads = config_.num_kv_heads;
  for (int l = 0; l < config_.num_layers; ++l)
    for (int h = 0; h < heads; ++h) {
      HeadMap& map = data.maps.emplace_back(
          std::min<int64_t>(config_.top_k_blocks, seq.max_blocks()), seq.max_blocks());
      std::vector<LogicalBlock>& keep = data.first_choice[l * heads + h];
      std::sort(keep.begin(), keep.end());
      // Chosen blocks below `slots` are a prefix of `keep` and stay; the rest fill the slots left
      // over, both in ascending order.
      auto moved = std::lower_bound(keep.begin(), keep.end(), LogicalBlock(slots));
      auto stays = keep.begin();
      for (int64_t s = 0; s < slots; ++s) {
        if (stays != keep.end() && *stays == LogicalBlock(s)) {
          map.append(*stays++, step);
          continue;
        }
        std::memcpy(tiers_.device.block_head(l, seq.pages()[s], h),
                    tiers_.device.block_head(l, seq.pages()[moved->value], h), bytes);
        map.append(*moved++, step);
      }
    }
  data.first_choice.clear();
}

// Between their pages and their host units.
void CpuBackend::copy_open_blocks(const SequenceKv& seq, bool to_device) {
  const size_t bytes = config_.page_elements() * sizeof(float);
  for (int64_t b = seq.settled; b < seq.open_blocks_end(); ++b)
    for (int l = 0; l < config_.num_layers; ++l) {
      const LogicalBlock block(b);
      float* page = tiers_.device.page(l, seq.page_of_open_block(block));
      float* unit = tiers_.host.unit(seq.host_unit(l, block));
      std::memcpy(to_device ? page : unit, to_device ? unit : page, bytes);
    }
}

void CpuBackend::save(const SequenceKv& seq) {
  background_->wait_step(row(seq).last_step);
  copy_open_blocks(seq, false);
  for (int64_t b = seq.settled; b < seq.complete_blocks(); ++b)
    for (int l = 0; l < config_.num_layers; ++l)
      tiers_.host.mark_complete(seq.host_unit(l, LogicalBlock(b)));
}

void CpuBackend::restore(const SequenceKv& seq) {
  copy_open_blocks(seq, true);
  const size_t bytes = config_.block_head_elements() * sizeof(float);
  for (int l = 0; l < config_.num_layers; ++l)
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      const int64_t count = seq.in_sparse() ? map(seq, l, h).slots() : seq.settled;
      for (int64_t i = 0; i < count; ++i) {
        const LogicalBlock b = seq.in_sparse() ? map(seq, l, h).block(Slot(i)) : LogicalBlock(i);
        std::memcpy(tiers_.device.block_head(l, seq.pages()[i], h),
                    tiers_.host.block_head(seq.host_unit(l, b), h), bytes);
      }
    }
}

void CpuBackend::release(const SequenceKv& seq) { background_->wait_done(row(seq).last_step); }

LookaheadStats CpuBackend::stats(const SequenceKv& seq, int64_t) {
  background_->wait_done(row(seq).last_step);  // a step never begins before its tokens are read
  return row(seq).stats;
}

// ------------------------------------------------------------ a step

void CpuBackend::begin(std::shared_ptr<const StepPlan> plan) {
  plan_ = std::move(plan);
  next_layer_ = 0;
  for (const RowGroup& g : plan_->groups) {
    RowData& data = row(*g.seq);
    data.last_step = plan_->step;
    if (g.predicts && g.kind == RowKind::kDense)
      data.first_choice.resize(static_cast<size_t>(config_.num_layers) * config_.num_kv_heads);
  }
}

void CpuBackend::forward(int layer, const void* qkv, void* out) {
  const auto begin = std::chrono::steady_clock::now();
  background_->wait_transfer(layer, plan_->step - 1);
  const double stall_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  for (const RowGroup& g : plan_->groups) row(*g.seq).stats.stall_ms += stall_ms;

  LayerJob job{plan_, layer, settle(layer)};
  append_rows(layer, static_cast<const float*>(qkv));
  background_->launch(std::move(job));
  ++next_layer_;
  attend(layer, static_cast<float*>(out));
  background_->attended(layer, plan_->step);
  if (next_layer_ == config_.num_layers) plan_.reset();
}

std::vector<std::vector<Fill>> CpuBackend::settle(int layer) {
  std::vector<std::vector<Fill>> fills;
  for (const RowGroup& g : plan_->groups) fills.push_back(settle_group(g, layer));
  return fills;
}

void CpuBackend::summarize(const SequenceKv& seq, int layer, int head, LogicalBlock block) {
  ops_.summarize(summary_kind_,
                 tiers_.device.block_head(layer, seq.page_of_open_block(block), head),
                 config_.head_dim, tiers_.summary.entry(layer, seq.summary_pages(), head, block));
}

// Summarises the blocks that are complete since the last step; a sparse sequence's also moves from
// the local page into a slot.
std::vector<Fill> CpuBackend::settle_group(const RowGroup& g, int layer) {
  std::vector<Fill> fills;
  if (!config_.sparse_enabled) return fills;
  for (int64_t b = g.settle_from; b < g.settle_to; ++b) {
    const LogicalBlock block(b);
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      summarize(*g.seq, layer, h, block);
      if (g.kind != RowKind::kSparse) continue;
      HeadMap& map = this->map(*g.seq, layer, h);
      Fill fill;
      if (g.grows) {
        fill.slot = map.append(block, plan_->step);
      } else {
        fill.slot = map.victim();
        fill.evicted = map.replace(fill.slot, block, plan_->step);
      }
      std::memcpy(tiers_.device.block_head(layer, DevicePage(g.pages[fill.slot.value]), h),
                  tiers_.device.block_head(layer, g.seq->page_of_open_block(block), h),
                  config_.block_head_elements() * sizeof(float));
      fills.push_back(fill);
    }
  }
  return fills;
}

// RoPE; K and V into their pages, queries into q_ and the predicting ones into the layer's staging
// buffer.
void CpuBackend::append_rows(int layer, const float* qkv) {
  const int dim = config_.head_dim, half = dim / 2;
  const int64_t q_floats = int64_t{config_.num_q_heads} * dim,
                kv_floats = int64_t{config_.num_kv_heads} * dim;
  float* staged = background_->staged(layer);
  for (const RowGroup& g : plan_->groups)
    for (int r = 0; r < g.rows; ++r) {
      const int64_t position = g.start + r, row = g.row0 + r;
      const float* in = qkv + row * (q_floats + 2 * kv_floats);
      const float *cos = cos_.data() + position * half, *sin = sin_.data() + position * half;
      float* q = q_.data() + row * q_floats;
      ops_.rope(in, config_.num_q_heads, dim, cos, sin, q);
      const DevicePage page = g.seq->page_of_position(position);
      const int64_t token = position % kBlockTokens;
      for (int h = 0; h < config_.num_kv_heads; ++h) {
        float* keys = tiers_.device.block_head(layer, page, h) + token * dim;
        ops_.rope(in + q_floats + int64_t{h} * dim, 1, dim, cos, sin, keys);
        std::memcpy(keys + kBlockTokens * dim, in + q_floats + kv_floats + int64_t{h} * dim,
                    dim * sizeof(float));
      }
      const int index = r - g.first_staged_row();
      if (index >= 0 && index < g.staged_rows)
        std::memcpy(staged + (g.staged0 + index) * q_floats, q, q_floats * sizeof(float));
    }
}

void CpuBackend::attend(int layer, float* out) {
  const int64_t q_floats = int64_t{config_.num_q_heads} * config_.head_dim;
  std::vector<AttentionSegment> segments;
  for (const RowGroup& g : plan_->groups)
    segments.push_back({q_.data() + g.row0 * q_floats, out + g.row0 * q_floats, g.pages.data(),
                        g.rows, g.visible});
  AttentionArgs args{segments.data(),
                     static_cast<int32_t>(segments.size()),
                     tiers_.device.layer(layer),
                     config_.num_kv_heads,
                     config_.group(),
                     config_.head_dim,
                     q_floats,
                     q_floats,
                     nullptr,
                     config_.num_threads};
  const size_t need = ops_.attention_scratch(args);
  if (scratch_.size() < need) scratch_.resize(need);
  args.scratch = scratch_.data();
  ops_.attention(args);
}

// Layers that never ran still pass through the background, so that later waits find their step.
void CpuBackend::finish_layers() {
  for (; next_layer_ < config_.num_layers; ++next_layer_) {
    auto empty = std::make_shared<StepPlan>();
    empty->step = plan_->step;
    background_->launch({empty, next_layer_, {}});
  }
  for (int l = 0; l < config_.num_layers; ++l) background_->attended(l, plan_->step);
}

void CpuBackend::abort() {
  if (!plan_) return;
  finish_layers();
  plan_.reset();
}

void CpuBackend::drain() { background_->wait_launched(); }

}  // namespace oasis::cpu
