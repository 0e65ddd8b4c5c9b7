#include "kv/sequence.h"

#include <algorithm>

namespace oasis {

SequenceKv::SequenceKv(const CoreConfig& config, Pools& pools, int64_t max_tokens)
    : pools_(pools),
      layers_(config.num_layers),
      max_blocks_(blocks_for(max_tokens)),
      max_slots_(std::min<int64_t>(config.top_k_blocks, max_blocks_)),
      max_summary_pages_(config.sparse_enabled ? div_up(max_blocks_, kSummaryBlocks) : 0),
      max_host_blocks_(config.host_blocks > 0 ? max_blocks_ * layers_ : 0) {}

SequenceKv::~SequenceKv() {
  give_back_pages();
  pools_.summary.give_back_all(summary_pages_);
  // The last block first: what is kept goes in the order in which it is let go, and a block is of
  // no use without those before it, which may be kept for others.
  for (int64_t b = static_cast<int64_t>(host_.size()) / layers_; b-- > 0;) {
    const auto at = static_cast<size_t>(b);
    if (at < kept_.size() && kept_[at])
      pools_.host.release(*kept_[at]);
    else
      pools_.host.give_back(units(b));
    if (at < names_.size()) pools_.host.touch(names_[at]);
  }
  if (row_.valid()) pools_.rows.give_back(row_);
}

bool SequenceKv::reserve(int64_t blocks, const std::vector<BlockName>& names, int64_t most_reused) {
  const auto most = std::min<size_t>(names.size(), most_reused);
  const auto run = pools_.host.find_run(std::span(names).first(most));
  const auto reused = static_cast<int64_t>(run.size());
  const int64_t own = max_host_blocks_ - reused * layers_;
  if (pools_.rows.free_count() == 0 || pools_.summary.free_count() < max_summary_pages_ ||
      pools_.host.free_count_beside(run) < own || !grow_pages(blocks))
    return false;
  for (HostPool::Handle block : run) {
    pools_.host.use(block);
    host_.insert(host_.end(), block->units.begin(), block->units.end());
    kept_.emplace_back(block);
  }
  pools_.host.take(own, host_);
  names_ = names;
  settled = stats.kv_blocks = stats.kv_blocks_reused = reused;
  committed = exact = reused * kBlockTokens;
  row_ = pools_.rows.take();
  return pools_.summary.take_all(max_summary_pages_, summary_pages_);
}

void SequenceKv::keep(int64_t from, int64_t to) {
  to = std::min({to, named_blocks(), exact / kBlockTokens});
  if (static_cast<int64_t>(kept_.size()) < to) kept_.resize(to);
  for (int64_t b = from; b < to; ++b)
    if (!kept_[b]) kept_[b] = pools_.host.keep(names_[b], units(b));
}

void SequenceKv::forget() {
  for (const auto& block : kept_)
    if (block) pools_.host.forget(*block);
  names_.clear();
}

bool SequenceKv::grow_pages(int64_t total) {
  const int64_t missing = total - static_cast<int64_t>(pages_.size());
  return missing <= 0 || pools_.device.take_all(missing, pages_);
}

std::vector<int32_t> SequenceKv::reading_order(int64_t last_position) const {
  std::vector<int32_t> order;
  const int64_t last_block = last_position / kBlockTokens;
  order.reserve(sparse_ ? pages_.size() + kLocalPages : last_block + 1);
  if (!sparse_) {
    for (int64_t b = 0; b <= last_block; ++b) order.push_back(pages_[b].value);
    return order;
  }
  for (DevicePage p : pages_) order.push_back(p.value);
  for (int64_t b = complete_blocks(); b <= last_block; ++b)
    order.push_back(local_[b % kLocalPages].value);
  return order;
}

void SequenceKv::turn_sparse(int64_t complete) {
  const int64_t slots = first_slots(complete);
  const int64_t local_end = complete + kLocalPages;
  for (int64_t b = complete; b < local_end; ++b) local_[b % kLocalPages] = pages_[b];
  for (int64_t b = slots; b < static_cast<int64_t>(pages_.size()); ++b)
    if (b < complete || b >= local_end) pools_.device.give_back(pages_[b]);
  pages_.resize(slots);
  sparse_ = true;
}

void SequenceKv::give_back_pages() {
  given_back_ = sparse_ ? used_slots() : static_cast<int64_t>(pages_.size());
  pools_.device.give_back_all(pages_);
  for (DevicePage& p : local_)
    if (p.valid()) {
      pools_.device.give_back(p);
      p = DevicePage();
    }
}

int64_t SequenceKv::pages_to_restore() const { return given_back_ + (sparse_ ? kLocalPages : 0); }

bool SequenceKv::take_pages_back() {
  if (pools_.device.free_count() < pages_to_restore()) return false;
  pools_.device.take_all(given_back_, pages_);
  if (sparse_)
    for (DevicePage& p : local_) p = pools_.device.take();
  return true;
}

}  // namespace oasis
