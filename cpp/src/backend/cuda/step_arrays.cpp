#include "backend/cuda/step_arrays.h"

#include <algorithm>
#include <cstring>

#include "ops/cuda/split.h"

namespace oasis::cuda {
namespace {

constexpr int64_t kAlign = 256;
constexpr int kFixedPages = 8, kFixedPieces = 4;  // what a split costs beside its work (split.h)
constexpr int kPieceBlocks = 16;                  // of scoring's splits
constexpr int64_t kMaxAttentionSplits = 2048, kMaxScoreSplits = 4096;

int64_t padded(int64_t blocks) { return div_up(blocks, 32) * 32; }

// As split_size says, but so that all splits fit a list of `most` and one more for each sequence.
int64_t bounded_size(const std::vector<int64_t>& lengths, int64_t units_each, int64_t grid,
                     int64_t fixed, int64_t most) {
  int64_t size = split_size(lengths, units_each, grid, fixed);
  auto splits = [&] {
    int64_t n = 0;
    for (int64_t length : lengths) n += div_up(length, size);
    return n;
  };
  while (splits() > most + static_cast<int64_t>(lengths.size())) size *= 2;
  return size;
}

}  // namespace

StepArrays::StepArrays(const CoreConfig& config)
    : config_(config),
      max_splits_(config.max_batch_size + kMaxAttentionSplits),
      max_score_splits_(config.max_batch_size + kMaxScoreSplits),
      max_decode_rows_(config.max_batch_size * (1 + config.max_draft_len)),
      max_logits_rows_(config.max_batch_size *
                       (config.accept_drafts ? std::max(1, config.max_draft_len) : 1)),
      decode_(places(max_decode_rows_, config.max_batch_size, 0)),
      whole_(places(config.max_num_tokens,
                    blocks_for(config.max_num_tokens) + 2 * config.max_batch_size,
                    config.num_kv_heads *
                        (div_up(int64_t{config.max_num_tokens} * config.group(), kPrefillLanes) +
                         config.max_batch_size))),
      device_(2 * whole_.bytes, "step metadata") {}

StepArrays::Places StepArrays::places(int64_t rows, int64_t settled, int64_t prefill_tiles) const {
  const int64_t batch = config_.max_batch_size;
  int64_t at = kAlign;
  auto place = [&](int64_t count, size_t size) {
    const int64_t offset = at;
    at += div_up(count * static_cast<int64_t>(size), kAlign) * kAlign;
    return offset;
  };
  Places p;
  p.segments = place(batch, sizeof(Segment));
  p.splits = place(max_splits_, sizeof(AttentionSplit));
  p.predictors = place(batch, sizeof(Predictor));
  p.score_splits = place(max_score_splits_, sizeof(ScoreSplit));
  p.settled = place(settled, sizeof(SettledBlock));
  p.logits_rows = place(max_logits_rows_, sizeof(LogitsRow));
  p.drafted = place(batch, sizeof(Drafted));
  p.drafted_requests = place(batch, sizeof(int32_t));
  p.rows = place(rows, sizeof(Row));
  p.prefill_tiles = place(prefill_tiles, sizeof(PrefillTile));
  p.pages = place(config_.device_pages, sizeof(int32_t));
  p.bytes = at;
  return p;
}

void StepArrays::send(const StepPlan& plan, const Cutting& cut, UploadRing& ring) {
  counts_ = {};
  counts_.step = plan.step;
  at_ = cut.decode ? &decode_ : &whole_;
  int64_t num_pages = 0;
  for (const RowGroup& g : plan.groups) num_pages += static_cast<int64_t>(g.pages.size());
  const int64_t bytes = at_->pages + num_pages * static_cast<int64_t>(sizeof(int32_t));
  char* to = ring.reserve(bytes);
  auto* pages = reinterpret_cast<int32_t*>(to + at_->pages);
  auto* segments = reinterpret_cast<Segment*>(to + at_->segments);
  for (const RowGroup& g : plan.groups) {
    std::copy(g.pages.begin(), g.pages.end(), pages);
    *segments++ = {static_cast<int32_t>(g.row0), g.rows,
                   static_cast<int32_t>(pages - reinterpret_cast<int32_t*>(to + at_->pages)),
                   static_cast<int32_t>(g.pages.size()), static_cast<int32_t>(g.visible)};
    pages += g.pages.size();
  }
  add_rows(plan, cut, reinterpret_cast<Row*>(to + at_->rows));
  add_attention(plan, cut, to);
  add_prediction(plan, cut, to);
  add_settled(plan, reinterpret_cast<SettledBlock*>(to + at_->settled));
  add_tokens(plan, cut, to);
  std::memcpy(to, &counts_, sizeof counts_);
  ring.send(device_.data() + (plan.step & 1) * whole_.bytes, bytes);
}

void StepArrays::add_rows(const StepPlan& plan, const Cutting& cut, Row* rows) const {
  for (const RowGroup& g : plan.groups)
    for (int r = 0; r < g.rows; ++r) {
      const int64_t position = g.start + r;
      const int staged = r - g.first_staged_row();
      *rows++ = {
          static_cast<int32_t>(position), g.seq->page_of_position(position).value,
          staged >= 0 && staged < g.staged_rows ? static_cast<int32_t>(g.staged0 + staged) : -1,
          g.seq->row().value, g.kind == RowKind::kPrefill ? 0 : r};
    }
  for (int64_t i = plan.rows; i < cut.padded_rows; ++i) *rows++ = {-1, 0, -1, 0, 0};
}

// In 16 bit decode rows are split over the pages, and prefill has tiles of its own; in float32 one
// split stands for a segment of either kind.
void StepArrays::add_attention(const StepPlan& plan, const Cutting& cut, char* to) {
  const bool exact = dtype_from(config_.dtype) == DType::kFloat32;
  std::vector<int64_t> lengths;
  std::vector<Segment> prefill(plan.groups.size(), Segment{});
  bool any_prefill = false;
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    const RowGroup& g = plan.groups[i];
    const auto n = static_cast<int64_t>(g.pages.size());
    if (g.kind == RowKind::kPrefill && !exact) {
      prefill[i] = reinterpret_cast<Segment*>(to + at_->segments)[i];
      any_prefill = true;
    } else {
      lengths.push_back(n);
    }
  }
  const int64_t size = exact || lengths.empty()
                           ? INT32_MAX
                           : bounded_size(lengths, int64_t{config_.num_kv_heads} * cut.lane_tiles,
                                          cut.attention_ctas, kFixedPages, kMaxAttentionSplits);
  auto* splits = reinterpret_cast<AttentionSplit*>(to + at_->splits);
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    if (prefill[i].rows > 0) continue;
    const auto n = static_cast<int64_t>(plan.groups[i].pages.size());
    const auto count = static_cast<int32_t>(div_up(n, size));
    for (int32_t s = 0; s < count; ++s)
      splits[counts_.splits++] = {static_cast<int32_t>(i), static_cast<int32_t>(n * s / count),
                                  static_cast<int32_t>(n * (s + 1) / count), s, count};
  }
  if (!any_prefill) return;
  const std::vector<PrefillTile> tiles =
      cuda::prefill_tiles(prefill, {config_.num_kv_heads, config_.group(), config_.head_dim});
  counts_.prefill_tiles = static_cast<int32_t>(tiles.size());
  std::copy(tiles.begin(), tiles.end(), reinterpret_cast<PrefillTile*>(to + at_->prefill_tiles));
}

void StepArrays::add_prediction(const StepPlan& plan, const Cutting& cut, char* to) {
  auto* predictors = reinterpret_cast<Predictor*>(to + at_->predictors);
  std::vector<int64_t> pieces;
  int64_t scores = 0;
  for (const RowGroup& g : plan.groups) {
    if (!g.predicts) continue;
    const int64_t blocks = g.settle_to;
    const bool sparse = g.kind == RowKind::kSparse;
    predictors[counts_.predictors++] = {g.seq->row().value,
                                        static_cast<int32_t>(g.staged0),
                                        g.staged_rows,
                                        static_cast<int32_t>(blocks),
                                        sparse ? static_cast<int32_t>(g.seq->pages().size()) : 0,
                                        static_cast<int32_t>(scores),
                                        static_cast<int32_t>(padded(blocks))};
    scores += int64_t{config_.num_q_heads} * g.staged_rows * padded(blocks);
    pieces.push_back(div_up(blocks, kPieceBlocks));
  }
  if (pieces.empty()) return;
  const int64_t size = kPieceBlocks * bounded_size(pieces, config_.num_kv_heads, cut.score_ctas,
                                                   kFixedPieces, kMaxScoreSplits);
  auto* splits = reinterpret_cast<ScoreSplit*>(to + at_->score_splits);
  for (int32_t p = 0; p < counts_.predictors; ++p)
    for (int64_t b = 0; b < predictors[p].blocks; b += size)
      splits[counts_.score_splits++] = {
          p, static_cast<int32_t>(b),
          static_cast<int32_t>(std::min<int64_t>(predictors[p].blocks, b + size))};
}

void StepArrays::add_settled(const StepPlan& plan, SettledBlock* settled) {
  for (const RowGroup& g : plan.groups)
    for (int64_t b = g.settle_from; b < g.settle_to; ++b) {
      const auto slots = static_cast<int32_t>(g.seq->pages().size()) - (g.grows ? 1 : 0);
      settled[counts_.settled++] = {g.seq->row().value, static_cast<int32_t>(b),
                                    g.seq->page_of_open_block(LogicalBlock(b)).value,
                                    g.kind == RowKind::kSparse ? slots : -1, g.grows ? 1 : 0};
    }
}

void StepArrays::add_tokens(const StepPlan& plan, const Cutting& cut, char* to) {
  auto* logits = reinterpret_cast<LogitsRow*>(to + at_->logits_rows);
  auto* drafted = reinterpret_cast<Drafted*>(to + at_->drafted);
  auto* requests = reinterpret_cast<int32_t*>(to + at_->drafted_requests);
  int32_t predictor = 0;
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    const RowGroup& g = plan.groups[i];
    const int first = g.kind == RowKind::kPrefill ? g.rows - g.logits_rows : 0;
    for (int r = first; r < first + g.logits_rows; ++r)
      logits[counts_.logits_rows++] = {static_cast<int32_t>(g.row0 + r), g.seq->row().value,
                                       static_cast<int32_t>(g.start + r)};
    if (g.drafts > 0) {
      requests[counts_.drafted] = g.seq->row().value;
      drafted[counts_.drafted++] = {
          g.seq->row().value,      static_cast<int32_t>(g.row0), g.drafts,
          static_cast<int32_t>(i), g.predicts ? predictor : -1,  static_cast<int32_t>(g.staged0)};
    }
    predictor += g.predicts;
  }
  for (int64_t i = counts_.logits_rows; i < cut.padded_logits; ++i) logits[i] = {-1, 0, 0};
  for (int64_t i = counts_.drafted; i < config_.max_batch_size; ++i) requests[i] = -1;
}

}  // namespace oasis::cuda
