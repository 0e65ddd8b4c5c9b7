#include "core.h"

#include <chrono>
#include <cstring>
#include <string>

#include <unistd.h>

namespace oasis {
namespace {

CoreConfig validated(CoreConfig c) {
  c.validate();
  return c;
}

}  // namespace

Core::Core(CoreConfig config, const float* cos, const float* sin)
    : config_(validated(std::move(config))),
      summary_kind_(summary_kind_from(config_.summary)),
      ops_(cpu_ops()),
      pools_(config_),
      cos_(cos, cos + config_.max_seq_len * config_.head_dim / 2),
      sin_(sin, sin + config_.max_seq_len * config_.head_dim / 2),
      background_(std::make_unique<Background>(config_, ops_, pools_)),
      scheduler_(std::make_unique<Scheduler>(config_, pools_, *background_)),
      owner_(getpid()),
      q_(static_cast<int64_t>(config_.max_num_tokens) * config_.num_q_heads * config_.head_dim) {}

Core::~Core() {
  if (getpid() != owner_) {
    // A forked child: waiting for workers that it does not have would never end.
    background_.release();
    return;
  }
  if (step_) finish_layers();
  background_.reset();  // its jobs name sequences that the scheduler owns
}

std::vector<std::pair<RequestId, int>> Core::begin_step() {
  if (step_)
    throw std::logic_error("begin_step() before commit() or abort_step() of the last step");
  return scheduler_->begin_step();
}

std::shared_ptr<const StepPlan> Core::plan(const std::map<RequestId, int>& drafts) {
  if (step_) throw std::logic_error("plan() before commit() or abort_step() of the last step");
  step_ = scheduler_->plan(drafts);
  next_layer_ = 0;
  return step_;
}

void Core::forward(int layer, const float* qkv, float* out) {
  if (!step_ || layer != next_layer_)
    throw std::logic_error("forward(" + std::to_string(layer) + ") out of order");
  const auto begin = std::chrono::steady_clock::now();
  background_->wait_transfer(layer, step_->step - 1);
  const double stall_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  for (RowGroup& g : step_->groups) g.seq->stats.stall_ms += stall_ms;

  LayerJob job{step_, layer, settle(layer)};
  append_rows(layer, qkv);
  background_->launch(std::move(job));
  ++next_layer_;
  attend(layer, out);
  background_->attended(layer, step_->step);
}

std::vector<std::vector<Fill>> Core::settle(int layer) {
  std::vector<std::vector<Fill>> fills;
  for (const RowGroup& g : step_->groups) fills.push_back(settle_group(g, layer));
  return fills;
}

// Summarises the blocks that are complete since the last step; a sparse sequence's also moves from
// the local page into a slot.
std::vector<Fill> Core::settle_group(const RowGroup& g, int layer) {
  std::vector<Fill> fills;
  if (!config_.sparse_enabled) return fills;
  for (int64_t b = g.settle_from; b < g.settle_to; ++b) {
    const LogicalBlock block(b);
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      const float* from = pools_.device.block_head(layer, g.seq->page_of_open_block(block), h);
      ops_.summarize(summary_kind_, from, config_.head_dim, g.seq->summary(layer, h, block));
      if (g.kind != RowKind::kSparse) continue;
      HeadMap& map = g.seq->map(layer, h);
      Fill fill;
      if (g.grows) {
        fill.slot = map.append(block, step_->step);
      } else {
        fill.slot = map.victim();
        fill.evicted = map.replace(fill.slot, block, step_->step);
      }
      std::memcpy(pools_.device.block_head(layer, DevicePage(g.pages[fill.slot.value]), h), from,
                  config_.block_head_floats() * sizeof(float));
      fills.push_back(fill);
    }
  }
  return fills;
}

// RoPE; K and V into their pages, queries into q_ and the predicting ones into the layer's staging
// buffer.
void Core::append_rows(int layer, const float* qkv) {
  const int dim = config_.head_dim, half = dim / 2;
  const int64_t q_floats = int64_t{config_.num_q_heads} * dim,
                kv_floats = int64_t{config_.num_kv_heads} * dim;
  float* staged = background_->staged(layer);
  for (const RowGroup& g : step_->groups)
    for (int r = 0; r < g.rows; ++r) {
      const int64_t position = g.start + r, row = g.row0 + r;
      const float* in = qkv + row * (q_floats + 2 * kv_floats);
      const float *cos = cos_.data() + position * half, *sin = sin_.data() + position * half;
      float* q = q_.data() + row * q_floats;
      ops_.rope(in, config_.num_q_heads, dim, cos, sin, q);
      const DevicePage page = g.seq->page_of_position(position);
      const int64_t token = position % kBlockTokens;
      for (int h = 0; h < config_.num_kv_heads; ++h) {
        float* keys = pools_.device.block_head(layer, page, h) + token * dim;
        ops_.rope(in + q_floats + int64_t{h} * dim, 1, dim, cos, sin, keys);
        std::memcpy(keys + kBlockTokens * dim, in + q_floats + kv_floats + int64_t{h} * dim,
                    dim * sizeof(float));
      }
      const int index = r - g.first_staged_row();
      if (index >= 0 && index < g.staged_rows)
        std::memcpy(staged + (g.staged0 + index) * q_floats, q, q_floats * sizeof(float));
    }
}

void Core::attend(int layer, float* out) {
  const int64_t q_floats = int64_t{config_.num_q_heads} * config_.head_dim;
  std::vector<AttentionSegment> segments;
  for (const RowGroup& g : step_->groups)
    segments.push_back({q_.data() + g.row0 * q_floats, out + g.row0 * q_floats, g.pages.data(),
                        g.rows, g.visible});
  AttentionArgs args{segments.data(),
                     static_cast<int32_t>(segments.size()),
                     pools_.device.layer(layer),
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

void Core::commit(const std::map<RequestId, int>& new_tokens) {
  if (!step_ || next_layer_ != config_.num_layers)
    throw std::logic_error("commit() before every layer's forward()");
  scheduler_->commit(*step_, new_tokens);
  step_.reset();
}

// Layers that never ran still pass through the background, so that later waits find their step.
void Core::finish_layers() {
  for (; next_layer_ < config_.num_layers; ++next_layer_) {
    auto empty = std::make_shared<StepPlan>();
    empty->step = step_->step;
    background_->launch({empty, next_layer_, {}});
  }
  for (int l = 0; l < config_.num_layers; ++l) background_->attended(l, step_->step);
}

void Core::abort_step() {
  if (!step_) return;
  finish_layers();
  step_.reset();
}

bool Core::end(RequestId id) {
  if (step_) throw std::logic_error("end() during a step");
  return scheduler_->end(id);
}

SequenceStats Core::stats(RequestId id) {
  const Request* r = scheduler_->find(id);
  if (!r || !r->seq) return {};
  background_->wait_done(r->last_step);
  return r->seq->stats;
}

Usage Core::usage() {
  return {pools_.device.ids.size(),
          pools_.device.ids.free_count(),
          pools_.host.ids.size(),
          pools_.host.ids.free_count(),
          pools_.summary.ids.size(),
          pools_.summary.ids.free_count(),
          scheduler_->count(RequestState::kWaiting),
          scheduler_->count(RequestState::kPrefill),
          scheduler_->count(RequestState::kDecode),
          scheduler_->count(RequestState::kPreempted)};
}

}  // namespace oasis
