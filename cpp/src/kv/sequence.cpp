#include "kv/sequence.h"

#include <algorithm>
#include <cstring>

namespace oasis {

SequenceKv::SequenceKv(const CoreConfig& config, Pools& pools, int64_t max_tokens)
    : config_(config),
      pools_(pools),
      layers_(config.num_layers),
      heads_(config.num_kv_heads),
      max_blocks_(blocks_for(max_tokens)),
      max_slots_(std::min<int64_t>(config.top_k_blocks, max_blocks_)) {}

SequenceKv::~SequenceKv() {
  give_back_device();
  pools_.host.ids.give_back_all(host_);
}

void SequenceKv::give_back_device() {
  pools_.device.ids.give_back_all(pages_);
  for (DevicePage& p : local_)
    if (p.valid()) {
      pools_.device.ids.give_back(p);
      p = DevicePage();
    }
  pools_.summary.ids.give_back_all(summary_pages_);
}

bool SequenceKv::reserve() {
  const int64_t summaries = config_.sparse_enabled ? div_up(max_blocks_, kSummaryBlocks) : 0;
  if (pools_.summary.ids.free_count() < summaries) return false;
  if (!pools_.host.ids.take_all(max_blocks_ * layers_, host_)) return false;
  for (HostBlock b : host_) pools_.host.mark_incomplete(b);
  return pools_.summary.ids.take_all(summaries, summary_pages_);
}

bool SequenceKv::grow_pages(int64_t total) {
  const int64_t missing = total - static_cast<int64_t>(pages_.size());
  return missing <= 0 || pools_.device.ids.take_all(missing, pages_);
}

DevicePage SequenceKv::page_of_open_block(LogicalBlock b) const {
  return sparse_ ? local_[b.value % 2] : pages_[b.value];
}

DevicePage SequenceKv::page_of_position(int64_t position) const {
  return page_of_open_block(LogicalBlock(position / kBlockTokens));
}

std::vector<int32_t> SequenceKv::reading_order(int64_t last_position) const {
  std::vector<int32_t> order;
  const int64_t last_block = last_position / kBlockTokens;
  if (!sparse_) {
    for (int64_t b = 0; b <= last_block; ++b) order.push_back(pages_[b].value);
    return order;
  }
  for (DevicePage p : pages_) order.push_back(p.value);
  for (int64_t b = complete_blocks(); b <= last_block; ++b) order.push_back(local_[b % 2].value);
  return order;
}

float* SequenceKv::summary(int layer, int head, LogicalBlock b) const {
  const SummaryPage page = summary_pages_[b.value / kSummaryBlocks];
  return pools_.summary.head(layer, page, head) +
         (b.value % kSummaryBlocks) * pools_.summary.entry_floats();
}

void SequenceKv::sparsify(std::vector<std::vector<LogicalBlock>>& chosen, int64_t complete,
                          int64_t step) {
  const int64_t slots = std::min<int64_t>(config_.top_k_blocks, complete);
  const size_t bytes = config_.block_head_floats() * sizeof(float);
  for (int i = 0; i < layers_ * heads_; ++i) maps_.emplace_back(max_slots_, max_blocks_);
  for (int l = 0; l < layers_; ++l)
    for (int h = 0; h < heads_; ++h) {
      std::vector<LogicalBlock>& keep = chosen[l * heads_ + h];
      std::sort(keep.begin(), keep.end());
      // Chosen blocks below `slots` are a prefix of `keep` and stay; the rest fill the slots left
      // over, both in ascending order.
      auto moved = std::lower_bound(keep.begin(), keep.end(), LogicalBlock(slots));
      auto stays = keep.begin();
      for (int64_t s = 0; s < slots; ++s) {
        if (stays != keep.end() && *stays == LogicalBlock(s)) {
          map(l, h).append(*stays++, step);
          continue;
        }
        std::memcpy(pools_.device.block_head(l, pages_[s], h),
                    pools_.device.block_head(l, pages_[moved->value], h), bytes);
        map(l, h).append(*moved++, step);
      }
    }
  for (int64_t b = complete; b < complete + 2; ++b) local_[b % 2] = pages_[b];
  for (int64_t b = slots; b < static_cast<int64_t>(pages_.size()); ++b)
    if (b != complete && b != complete + 1) pools_.device.ids.give_back(pages_[b]);
  pages_.resize(slots);
  sparse_ = true;
}

// The pages of blocks that are not on the host yet, in a fixed order.
std::vector<DevicePage> SequenceKv::open_pages() const {
  if (sparse_) return {local_[0], local_[1]};
  return {pages_.begin() + std::min<int64_t>(settled, pages_.size()), pages_.end()};
}

void SequenceKv::copy_open_pages(bool to_device) {
  float* at = saved_->open.data();
  const int64_t floats = config_.page_floats();
  for (DevicePage p : open_pages())
    for (int l = 0; l < layers_; ++l, at += floats) {
      float* page = pools_.device.page(l, p);
      std::memcpy(to_device ? page : at, to_device ? at : page, floats * sizeof(float));
    }
}

void SequenceKv::copy_summaries(bool to_device) {
  float* at = saved_->summaries.data();
  const int64_t floats = pools_.summary.page_floats();
  for (SummaryPage p : summary_pages_)
    for (int l = 0; l < layers_; ++l, at += floats) {
      float* page = pools_.summary.page(l, p);
      std::memcpy(to_device ? page : at, to_device ? at : page, floats * sizeof(float));
    }
}

void SequenceKv::save_to_host() {
  saved_ = std::make_unique<Saved>();
  saved_->pages = static_cast<int64_t>(pages_.size());
  saved_->open.resize(open_pages().size() * layers_ * config_.page_floats());
  saved_->summary_pages = static_cast<int64_t>(summary_pages_.size());
  saved_->summaries.resize(summary_pages_.size() * layers_ * pools_.summary.page_floats());
  copy_open_pages(false);
  copy_summaries(false);
  give_back_device();
  ++stats.preemptions;
}

int64_t SequenceKv::pages_to_restore() const { return saved_->pages + (sparse_ ? 2 : 0); }

bool SequenceKv::restore_from_host() {
  if (pools_.device.ids.free_count() < pages_to_restore() ||
      pools_.summary.ids.free_count() < saved_->summary_pages)
    return false;
  pools_.device.ids.take_all(saved_->pages, pages_);
  pools_.summary.ids.take_all(saved_->summary_pages, summary_pages_);
  if (sparse_)
    for (DevicePage& p : local_) p = pools_.device.ids.take();
  copy_open_pages(true);
  copy_summaries(true);
  saved_.reset();
  const size_t bytes = config_.block_head_floats() * sizeof(float);
  for (int l = 0; l < layers_; ++l)
    for (int h = 0; h < heads_; ++h) {
      const int64_t count = sparse_ ? map(l, h).slots() : std::min<int64_t>(settled, pages_.size());
      for (int64_t i = 0; i < count; ++i) {
        const LogicalBlock b = sparse_ ? map(l, h).block(Slot(i)) : LogicalBlock(i);
        std::memcpy(pools_.device.block_head(l, pages_[i], h),
                    pools_.host.block_head(host_unit(l, b), h), bytes);
      }
    }
  return true;
}

}  // namespace oasis
