// Which blocks a head wants next, and which of the missing ones it may fetch. The order of
// everything here is total (docs/design.md, section 5), so the result depends on scores and step
// counters alone.
#pragma once

#include <vector>

#include "backend/cpu/head_map.h"
#include "backend/cpu/tiers.h"
#include "oasis/ops.h"
#include "pipeline/trace.h"

namespace oasis::cpu {

// One head's summaries of blocks [0, blocks) in one layer.
struct HeadSummaries {
  const SummaryTier& tier;
  const std::vector<SummaryPage>& pages;
  int layer, head;
  int64_t blocks;
};

// Scores of the blocks for one KV head: the group combined, then the maximum over the
// staged rows. Sink blocks score infinitely: their few tokens hold much of the attention, which no
// mean over a block shows. queries: [rows][q_stride], pointing at the head's first query.
class Scorer {
 public:
  Scorer(const CoreConfig& config, const Ops& ops);
  const std::vector<float>& score(const HeadSummaries& summaries, const float* queries, int rows,
                                  int64_t q_stride);

 private:
  void score_query(const HeadSummaries& summaries, const float* q, float* out) const;

  const Ops& ops_;
  SummaryKind kind_;
  GroupCombine combine_;
  int group_, head_dim_, sink_blocks_;
  std::vector<float> query_, row_, total_;
};

// The best min(k, n) blocks by (score descending, lower block first); NaN ranks last.
std::vector<LogicalBlock> top_k(const std::vector<float>& scores, int64_t k);

// Touches what is resident, admits at most `cap` of what is missing, and updates the map.
Selection select(HeadMap& map, std::vector<LogicalBlock> predicted, int64_t cap, int64_t step);

}  // namespace oasis::cpu
