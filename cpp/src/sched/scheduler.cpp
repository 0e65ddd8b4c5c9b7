#include "sched/scheduler.h"

#include <algorithm>
#include <string>

namespace oasis {

Scheduler::Scheduler(const CoreConfig& config, Pools& pools, Backend& backend)
    : config_(config), pools_(pools), backend_(backend) {}

// The device pages a request needs at its widest, running alone (docs/design.md, section 3).
int64_t Scheduler::pages_alone(int64_t prompt_tokens, int64_t max_new_tokens) const {
  const int64_t all = blocks_for(prompt_tokens + max_new_tokens);
  if (!config_.sparse_enabled) return all;
  const int64_t slack = 2 * config_.max_draft_len + 2;
  const int64_t dense_tokens = std::max(prompt_tokens, config_.sparse_from_tokens) + slack;
  const int64_t dense = std::min(all, blocks_for(dense_tokens)) + kLocalPages;
  return std::max(dense, std::min<int64_t>(config_.top_k_blocks, all) + kLocalPages);
}

void Scheduler::check(int64_t prompt_tokens, int64_t max_new_tokens) const {
  if (prompt_tokens < 1)
    throw std::invalid_argument("prompt_tokens = " + std::to_string(prompt_tokens) +
                                ": must be at least 1");
  if (max_new_tokens < 1)
    throw std::invalid_argument("max_new_tokens = " + std::to_string(max_new_tokens) +
                                ": must be at least 1");
  const std::string what = "a prompt of " + std::to_string(prompt_tokens) +
                           " tokens with max_tokens " + std::to_string(max_new_tokens);
  if (max_new_tokens > config_.max_seq_len - prompt_tokens)
    throw CapacityError(what + " exceeds max_seq_len " + std::to_string(config_.max_seq_len) +
                        ": shorten the prompt or lower max_tokens");
  const int64_t max_tokens = prompt_tokens + max_new_tokens;
  if (pages_alone(prompt_tokens, max_new_tokens) > config_.device_pages)
    throw CapacityError(what + " needs " +
                        std::to_string(pages_alone(prompt_tokens, max_new_tokens)) +
                        " device pages, the pool has " + std::to_string(config_.device_pages) +
                        ": raise device_kv_gib or shorten the prompt");
  const int64_t host = blocks_for(max_tokens) * config_.num_layers;
  if (config_.host_blocks > 0 && host > config_.host_blocks)
    throw CapacityError(what + " needs " + std::to_string(host) + " host blocks, the pool has " +
                        std::to_string(config_.host_blocks) +
                        ": raise host_kv_gib or lower max_tokens");
  if (config_.sparse_enabled &&
      div_up(blocks_for(max_tokens), kSummaryBlocks) > pools_.summary.size())
    throw CapacityError(what + " needs more summary pages than the pool has (" +
                        std::to_string(pools_.summary.size()) + "): raise summary_pages");
}

void Scheduler::submit(RequestId id, int64_t prompt_tokens, int64_t max_new_tokens,
                       std::vector<BlockName> names) {
  if (find(id))
    throw std::invalid_argument("request id " + std::to_string(id) + " is already in use");
  check(prompt_tokens, max_new_tokens);
  if (static_cast<int64_t>(names.size()) > prompt_tokens / kBlockTokens)
    throw std::invalid_argument(std::to_string(names.size()) + " names for a prompt of " +
                                std::to_string(prompt_tokens) +
                                " tokens: at most one a complete block of 16");
  if (!names.empty() && config_.host_blocks == 0)
    throw std::invalid_argument("names without a host tier (host_blocks = 0): nothing is kept");
  auto r = std::make_unique<Request>();
  r->id = id;
  r->prompt_tokens = prompt_tokens;
  r->max_new_tokens = max_new_tokens;
  r->tokens = prompt_tokens;
  r->names = std::move(names);
  requests_.push_back(std::move(r));
}

bool Scheduler::end(RequestId id, std::vector<BlockName> names) {
  const auto at =
      std::find_if(requests_.begin(), requests_.end(), [&](const auto& r) { return r->id == id; });
  if (at == requests_.end()) return false;
  if ((*at)->seq) {
    keep_blocks(**at, std::move(names));
    backend_.release(*(*at)->seq);
  }
  requests_.erase(at);
  return true;
}

void Scheduler::forget(RequestId id) {
  Request* r = find(id);
  if (r && r->seq) r->seq->forget();
}

// All that is complete, also what no step has settled yet. What is preempted was saved then.
void Scheduler::keep_blocks(Request& r, std::vector<BlockName> names) {
  SequenceKv& seq = *r.seq;
  if (static_cast<int64_t>(names.size()) > seq.named_blocks()) seq.name_more(std::move(names));
  int64_t complete = std::min(seq.exact / kBlockTokens, seq.named_blocks());
  if (complete > seq.settled && r.running()) {
    try {
      backend_.save(seq);
    } catch (...) {  // a backend that has failed serves no more, but whoever runs must end
      complete = seq.settled;
    }
  }
  seq.keep(0, complete);
}

Request* Scheduler::find(RequestId id) {
  for (const auto& r : requests_)
    if (r->id == id) return r.get();
  return nullptr;
}

int64_t Scheduler::count(RequestState state) const {
  return std::count_if(requests_.begin(), requests_.end(),
                       [&](const auto& r) { return r->state == state; });
}

int Scheduler::running() const {
  return static_cast<int>(std::count_if(requests_.begin(), requests_.end(),
                                        [](const auto& r) { return r->running(); }));
}

bool Scheduler::selects_first(const Request& r) const {
  return config_.sparse_enabled && r.state == RequestState::kDecode && !r.seq->in_sparse() &&
         !r.first_choice && r.seq->committed >= config_.sparse_from_tokens;
}

// How many draft rows a decoding request may use.
int Scheduler::draft_rows(const Request& r) const {
  const bool predicts = r.seq->in_sparse() || selects_first(r) || r.first_choice;
  if (!config_.accept_drafts && !predicts) return 0;
  return static_cast<int>(std::min<int64_t>(config_.max_draft_len, r.max_tokens() - r.tokens));
}

// The pages of a decoding request with so many rows: a sparse one's slots, and one more while its
// working set grows.
int64_t Scheduler::decode_pages(const Request& r, int rows) const {
  if (!r.seq->in_sparse()) return blocks_for(r.seq->committed + rows);
  return r.seq->used_slots() + (r.grows ? 1 : 0);
}

void Scheduler::preempt(Request& r) {
  backend_.save(*r.seq);
  r.seq->give_back_pages();
  ++r.seq->stats.preemptions;
  r.resume_to = r.state;
  r.state = RequestState::kPreempted;
}

// Pages for `r`, preempting the youngest running request while there are too few; false when that
// was `r` itself.
bool Scheduler::make_room(Request& r, int64_t total_pages) {
  while (!r.seq->grow_pages(total_pages)) {
    const auto youngest = std::find_if(requests_.rbegin(), requests_.rend(),
                                       [](const auto& q) { return q->running(); });
    preempt(**youngest);
    if (youngest->get() == &r) return false;
  }
  return true;
}

void Scheduler::turn_sparse() {
  for (const auto& r : requests_) {
    if (!r->first_choice || r->state != RequestState::kDecode || r->exhausted()) continue;
    const FirstChoice& first = *r->first_choice;
    if (!make_room(*r, first.complete + kLocalPages)) continue;  // preempted: after it resumes
    backend_.sparsify(*r->seq, first.complete, first.step);
    r->seq->turn_sparse(first.complete);
    r->first_choice.reset();
  }
}

// Whether a page for each running request is left after taking `pages`: else their next ones would
// preempt the newcomer at once.
bool Scheduler::leaves_room(int64_t pages) const {
  return pools_.device.free_count() >= pages + running();
}

void Scheduler::resume_one() {
  for (const auto& r : requests_) {
    if (r->state != RequestState::kPreempted) continue;
    if (running() < config_.max_batch_size && leaves_room(r->seq->pages_to_restore()) &&
        r->seq->take_pages_back()) {
      backend_.restore(*r->seq);
      r->state = r->resume_to;
    }
    return;  // oldest first: a younger one must not overtake it
  }
}

void Scheduler::admit() {
  if (count(RequestState::kPreempted) > 0) return;
  for (const auto& r : requests_) {
    if (r->state != RequestState::kWaiting) continue;
    if (running() >= config_.max_batch_size) return;
    // Without a host tier nothing can be preempted, so that all pages are reserved at once.
    const int64_t pages = blocks_for(config_.host_blocks > 0 ? r->prompt_tokens : r->max_tokens());
    if (!leaves_room(pages)) return;
    auto seq = std::make_unique<SequenceKv>(config_, pools_, r->max_tokens());
    // At least one token is computed: its logits are asked for.
    if (!seq->reserve(pages, r->names, (r->prompt_tokens - 1) / kBlockTokens)) return;
    backend_.admit(*seq);
    r->seq = std::move(seq);
    r->state = RequestState::kPrefill;
  }
}

// Who decodes is settled before drafts are asked for, with pages for all rows: a request that
// resumed later, or were preempted after it drafted, would draft differently from one that is
// alone.
std::vector<std::pair<RequestId, int>> Scheduler::begin_step() {
  for (const auto& r : requests_)
    if (r->broken)
      throw std::logic_error("request " + std::to_string(r->id) +
                             " was sparse in a step that broke off: end it");
  if (begun_) {  // its caller was interrupted: what it settled stands
    std::erase_if(wanted_, [&](const auto& w) { return find(w.first) == nullptr; });
    return wanted_;
  }
  resume_one();
  turn_sparse();
  begun_ = true;
  wanted_.clear();
  for (const auto& r :
       requests_) {  // oldest first: making room for one never takes from an older one
    if (r->state != RequestState::kDecode || r->exhausted()) continue;
    const int rows = draft_rows(*r);
    r->grows = r->seq->grows();
    if (make_room(*r, decode_pages(*r, 1 + rows)) && rows > 0) wanted_.emplace_back(r->id, rows);
  }
  return wanted_;
}

std::shared_ptr<StepPlan> Scheduler::plan(const std::map<RequestId, int>& drafts) {
  if (!begun_) throw std::logic_error("plan() without begin_step()");
  begun_ = false;
  admit();
  auto plan = std::make_shared<StepPlan>();
  plan->step = step_ + 1;
  for (const auto& r : requests_) {
    if (r->state != RequestState::kDecode || r->exhausted()) continue;
    const auto d = drafts.find(r->id);
    add_decode(*plan, *r, d == drafts.end() ? 0 : d->second);
  }
  for (const auto& r : requests_)
    if (r->state == RequestState::kPrefill && plan->rows < config_.max_num_tokens)
      add_prefill(*plan, *r);
  if (plan->groups.empty()) return nullptr;
  step_ = plan->step;
  return plan;
}

void Scheduler::add_decode(StepPlan& plan, Request& r, int drafts) {
  if (drafts < 0 || drafts > draft_rows(r))
    throw std::invalid_argument("drafts = " + std::to_string(drafts) + " for request " +
                                std::to_string(r.id) + ": more than begin_step() allows");
  const bool first = selects_first(r);
  RowGroup g;
  g.kind = r.seq->in_sparse() ? RowKind::kSparse : RowKind::kDense;
  g.start = r.seq->committed;
  g.rows = 1 + drafts;
  g.drafts = drafts;
  g.logits_rows = config_.accept_drafts ? std::max(1, drafts) : 1;  // the last draft row is a scout
  g.predicts = first || g.kind == RowKind::kSparse;
  g.grows = r.grows;
  add_group(plan, r, std::move(g));
}

void Scheduler::add_prefill(StepPlan& plan, Request& r) {
  RowGroup g;
  g.kind = RowKind::kPrefill;
  g.start = r.seq->committed;
  g.rows = static_cast<int>(
      std::min<int64_t>(r.prompt_tokens - g.start, config_.max_num_tokens - plan.rows));
  g.logits_rows = g.start + g.rows == r.prompt_tokens ? 1 : 0;
  add_group(plan, r, std::move(g));
}

void Scheduler::add_group(StepPlan& plan, Request& r, RowGroup g) {
  g.id = r.id;
  g.seq = r.seq.get();
  g.row0 = plan.rows;
  g.settle_from = r.seq->settled;
  g.settle_to = r.seq->complete_blocks();
  g.pages = r.seq->reading_order(g.start + g.rows - 1);
  const int64_t resident = g.kind == RowKind::kSparse
                               ? static_cast<int64_t>(r.seq->pages().size()) * kBlockTokens
                               : g.settle_to * kBlockTokens;
  g.visible = resident + g.start + 1 - g.settle_to * kBlockTokens;
  g.staged0 = plan.staged_rows;
  g.staged_rows = g.predicts ? std::max(1, g.drafts) : 0;
  plan.rows += g.rows;
  plan.staged_rows += g.staged_rows;
  plan.groups.push_back(std::move(g));
}

void Scheduler::break_off(const StepPlan& plan) {
  for (const RowGroup& g : plan.groups)
    if (g.kind == RowKind::kSparse) find(g.id)->broken = true;
}

void Scheduler::commit(const StepPlan& plan, const std::map<RequestId, int>& new_tokens) {
  for (const RowGroup& g : plan.groups) {
    Request& r = *find(g.id);
    int yielded = 0;
    if (g.logits_rows > 0) {
      const auto n = new_tokens.find(g.id);
      yielded = n == new_tokens.end() ? 0 : n->second;
      if (yielded < 1 || yielded > std::max(1, g.drafts))
        throw std::invalid_argument("new_tokens = " + std::to_string(yielded) + " for request " +
                                    std::to_string(g.id) + ": must be 1.." +
                                    std::to_string(std::max(1, g.drafts)));
    }
    r.tokens += yielded;
    r.seq->settled = g.settle_to;
    r.seq->keep(g.settle_from, g.settle_to);
    r.seq->committed += g.kind == RowKind::kPrefill ? g.rows : yielded;
    if (g.kind != RowKind::kSparse || g.settle_to <= config_.top_k_blocks)
      r.seq->exact = r.seq->committed;
    if (g.kind != RowKind::kPrefill) r.seq->stats_before = {r.seq->stats, plan.step};
    r.seq->stats.kv_blocks = blocks_for(r.seq->committed);
    if (g.kind == RowKind::kPrefill) {
      if (g.logits_rows > 0) r.state = RequestState::kDecode;
      continue;
    }
    SequenceStats& s = r.seq->stats;
    if (g.kind == RowKind::kDense) {
      ++s.dense_steps;
      if (g.predicts) r.first_choice = {g.settle_to, plan.step};
    }
    if (g.kind == RowKind::kSparse) {
      ++s.sparse_steps;
      s.resident_tokens_max = std::max(s.resident_tokens_max, g.visible + g.rows - 1);
    }
  }
}

}  // namespace oasis
