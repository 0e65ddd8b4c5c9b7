#include "backend/cpu/background.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace oasis::cpu {

Background::Background(const CoreConfig& config, const Ops& ops, Tiers& tiers,
                       std::vector<RowData>& rows)
    : config_(config),
      ops_(ops),
      tiers_(tiers),
      rows_(rows),
      scorer_(config, ops),
      attended_(config.num_layers),
      transferred_(config.num_layers),
      delay_rng_(config.fault_seed) {
  const int64_t staged_rows = int64_t{config.max_batch_size} * std::max(1, config.max_draft_len);
  staged_.assign(config.num_layers,
                 std::vector<float>(staged_rows * config.num_q_heads * config.head_dim));
}

void Background::launch(LayerJob job) {
  if (job.layer == config_.num_layers - 1) launched_ = job.plan->step;
  predictor_.push([this, job = std::make_shared<LayerJob>(std::move(job))] {
    auto copies = std::make_shared<std::vector<Copy>>();
    guard([&] { *copies = predict(*job); });
    transfer_worker_.push([this, job, copies] {
      guard([&] { transfer(*job, *copies); });
      transferred_[job->layer].record(job->plan->step);
    });
  });
}

void Background::wait_transfer(int layer, int64_t step) {
  transferred_[layer].wait(step);
  std::lock_guard lock(error_mutex_);
  if (error_) std::rethrow_exception(error_);
}

// The first error is kept and told to the foreground; the events go on, so that nobody hangs.
void Background::guard(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

std::vector<Background::Copy> Background::predict(const LayerJob& job) {
  std::vector<Copy> copies;
  const int64_t q_stride = int64_t{config_.num_q_heads} * config_.head_dim;
  const int64_t step = job.plan->step;
  for (size_t i = 0; i < job.plan->groups.size(); ++i) {
    const RowGroup& g = job.plan->groups[i];
    if (!g.predicts) continue;
    RowData& data = rows_[g.seq->row().value];
    const bool first = g.kind == RowKind::kDense;
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      const float* q = staged(job.layer) + g.staged0 * q_stride +
                       int64_t{h} * config_.group() * config_.head_dim;
      std::vector<LogicalBlock> predicted =
          top_k(scorer_.score({tiers_.summary, g.seq->summary_pages(), job.layer, h, g.settle_to},
                              q, g.staged_rows, q_stride),
                config_.top_k_blocks);
      TraceRecord record;
      if (first) {
        data.first_choice[job.layer * config_.num_kv_heads + h] = predicted;
        record.selection.predicted = std::move(predicted);
      } else {
        HeadMap& map = data.maps[job.layer * config_.num_kv_heads + h];
        record.selection = select(map, std::move(predicted), config_.fetch_cap_blocks, step);
        for (const Admission& a : record.selection.admitted) {
          const HostBlock unit = g.seq->host_unit(job.layer, a.block);
          copies.push_back(
              {unit, tiers_.host.block_head(unit, h),
               tiers_.device.block_head(job.layer, DevicePage(g.pages[a.slot.value]), h)});
        }
        data.stats.predicted += static_cast<int64_t>(record.selection.predicted.size());
        data.stats.admitted += static_cast<int64_t>(record.selection.admitted.size());
        data.stats.capped += record.selection.capped;
        data.stats.bytes_fetched += static_cast<int64_t>(
            record.selection.admitted.size() * config_.block_head_elements() * sizeof(float));
        if (config_.trace) {
          record.map = map.blocks();
          record.last_selected = map.last();
        }
      }
      if (!config_.trace) continue;
      record.step = step;
      record.id = g.id;
      record.layer = job.layer;
      record.head = h;
      record.first = first;
      if (!job.fills[i].empty()) {
        record.filled = true;
        record.fill_slot = job.fills[i][h].slot;
        record.fill_evicted = job.fills[i][h].evicted;
      }
      std::lock_guard lock(trace_mutex_);
      trace_.push_back(std::move(record));
    }
  }
  return copies;
}

void Background::write_through(const RowGroup& g, int layer, const std::vector<Fill>& fills) {
  const size_t bytes = config_.block_head_elements() * sizeof(float);
  for (int64_t b = g.settle_from; b < g.settle_to; ++b) {
    const LogicalBlock block(b);
    const HostBlock unit = g.seq->host_unit(layer, block);
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      // A sparse sequence's block is in its slot by now, and stays there until the gather below.
      const DevicePage page(g.pages[fills.empty() ? b : fills[h].slot.value]);
      std::memcpy(tiers_.host.block_head(unit, h), tiers_.device.block_head(layer, page, h), bytes);
    }
    tiers_.host.mark_complete(unit);
  }
}

void Background::transfer(const LayerJob& job, const std::vector<Copy>& copies) {
  delay();
  for (size_t i = 0; i < job.plan->groups.size(); ++i)
    write_through(job.plan->groups[i], job.layer, job.fills[i]);
  attended_[job.layer].wait(job.plan->step);
  const size_t bytes = config_.block_head_elements() * sizeof(float);
  for (const Copy& c : copies) {
    if (!tiers_.host.complete(c.unit))
      throw std::logic_error("a host unit was fetched before its write-through ended");
    std::memcpy(c.to, c.from, bytes);
  }
}

std::vector<TraceRecord> Background::take_trace() {
  std::lock_guard lock(trace_mutex_);
  return std::exchange(trace_, {});
}

void Background::delay() {
  if (config_.transfer_delay_us == 0) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(delay_rng_() % (config_.transfer_delay_us + 1)));
}

}  // namespace oasis::cpu
