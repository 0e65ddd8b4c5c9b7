#include "backend/cpu/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace oasis::cpu {
namespace {

// NaN wins whichever side it is on: a block with one broken score ranks last, whatever the order of
// heads and rows.
float max_or_nan(float a, float b) { return a > b || std::isnan(a) ? a : b; }

}  // namespace

Scorer::Scorer(const CoreConfig& config, const Ops& ops)
    : ops_(ops),
      kind_(summary_kind_from(config.summary)),
      combine_(group_combine_from(config.group_combine)),
      group_(config.group()),
      head_dim_(config.head_dim),
      sink_blocks_(config.sink_blocks) {}

void Scorer::score_query(const HeadSummaries& s, const float* q, float* out) const {
  for (int64_t b = 0; b < s.blocks; b += kSummaryBlocks)
    ops_.score(kind_, q, s.tier.entry(s.layer, s.pages, s.head, LogicalBlock(b)),
               std::min<int64_t>(kSummaryBlocks, s.blocks - b), head_dim_, out + b);
}

const std::vector<float>& Scorer::score(const HeadSummaries& summaries, const float* queries,
                                        int rows, int64_t q_stride) {
  const int64_t blocks = summaries.blocks;
  query_.resize(blocks);
  row_.resize(blocks);
  total_.resize(blocks);
  for (int r = 0; r < rows; ++r) {
    for (int g = 0; g < group_; ++g) {
      score_query(summaries, queries + r * q_stride + static_cast<int64_t>(g) * head_dim_,
                  query_.data());
      if (combine_ == GroupCombine::kSoftmaxSum)
        ops_.softmax(query_.data(), blocks, 1.0f / std::sqrt(static_cast<float>(head_dim_)));
      for (int64_t b = 0; b < blocks; ++b) {
        if (g == 0)
          row_[b] = query_[b];
        else if (combine_ == GroupCombine::kMax)
          row_[b] = max_or_nan(row_[b], query_[b]);
        else
          row_[b] += query_[b];
      }
    }
    for (int64_t b = 0; b < blocks; ++b)
      total_[b] = r == 0 ? row_[b] : max_or_nan(total_[b], row_[b]);
  }
  std::fill_n(total_.begin(), std::min<int64_t>(sink_blocks_, blocks),
              std::numeric_limits<float>::infinity());
  return total_;
}

std::vector<LogicalBlock> top_k(const std::vector<float>& scores, int64_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(scores[a]), nan_b = std::isnan(scores[b]);
    if (nan_a != nan_b) return nan_b;
    if (!nan_a && scores[a] != scores[b]) return scores[a] > scores[b];
    return a < b;
  };
  const int64_t count = std::min<int64_t>(k, order.size());
  if (count < static_cast<int64_t>(order.size()))
    std::nth_element(order.begin(), order.begin() + count, order.end(), better);
  std::sort(order.begin(), order.begin() + count, better);
  std::vector<LogicalBlock> best;
  best.reserve(count);
  for (int64_t i = 0; i < count; ++i) best.emplace_back(order[i]);
  return best;
}

Selection select(HeadMap& map, std::vector<LogicalBlock> predicted, int64_t cap, int64_t step) {
  Selection out;
  std::vector<bool> wanted(map.slots(), false);
  std::vector<LogicalBlock> missing;
  for (LogicalBlock b : predicted) {
    const Slot s = map.find(b);
    if (!s.valid()) {
      missing.push_back(b);
      continue;
    }
    wanted[s.value] = true;
    map.touch(s, step);
  }
  const int64_t admit = std::min<int64_t>(cap, missing.size());
  std::vector<Slot> victims;
  for (int s = 0; s < map.slots(); ++s)
    if (!wanted[s]) victims.emplace_back(s);
  std::partial_sort(victims.begin(), victims.begin() + admit, victims.end(),
                    [&](Slot a, Slot b) { return map.evict_before(a, b); });
  for (int64_t i = 0; i < admit; ++i) {
    const LogicalBlock evicted = map.replace(victims[i], missing[i], step);
    out.admitted.push_back({missing[i], victims[i], evicted});
  }
  out.capped = static_cast<int64_t>(missing.size()) - admit;
  out.predicted = std::move(predicted);
  return out;
}

}  // namespace oasis::cpu
