// Admission, the composition of each step, preemption and ending. Called between steps, by one
// thread.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "pipeline/backend.h"
#include "sched/request.h"

namespace oasis {

class Scheduler {
 public:
  Scheduler(const CoreConfig& config, Pools& pools, Backend& backend);

  // Throws CapacityError for what could never run here, even alone. Reads sizes only: any thread
  // may call it.
  void check(int64_t prompt_tokens, int64_t max_new_tokens) const;
  // `names`: of the prompt's complete blocks, or none. It begins with what is kept under them, and
  // keeps its own under them as they settle.
  void submit(RequestId id, int64_t prompt_tokens, int64_t max_new_tokens,
              std::vector<BlockName> names = {});
  // False if unknown. `names`: of all its complete blocks, as far as it may keep more than those
  // that it was submitted with.
  bool end(RequestId id, std::vector<BlockName> names = {});
  // The blocks that it keeps are found no more by whoever comes.
  void forget(RequestId id);
  // Settles who decodes in the next step (one resumes, some turn sparse); how many draft rows each
  // of them may use. Throws while there is a request that a step broke.
  std::vector<std::pair<RequestId, int>> begin_step();
  // The next step, or null when nothing can run. `drafts`: draft rows the caller has for each
  // request. After begin_step().
  std::shared_ptr<StepPlan> plan(const std::map<RequestId, int>& drafts);
  // Some of the step ran and the rest never will: in some layers of a sparse request blocks were
  // fetched, or one has its slot, in others not, and victims are gone. It can only be ended.
  void break_off(const StepPlan& plan);
  // The step is over: how many tokens each group with logits yielded.
  void commit(const StepPlan& plan, const std::map<RequestId, int>& new_tokens);

  Request* find(RequestId id);
  int64_t count(RequestState state) const;

 private:
  int64_t pages_alone(int64_t prompt_tokens, int64_t max_new_tokens) const;
  int draft_rows(const Request& r) const;
  int64_t decode_pages(const Request& r, int rows) const;
  bool selects_first(const Request& r) const;
  void keep_blocks(Request& r, std::vector<BlockName> names);
  void turn_sparse();
  void resume_one();
  void admit();
  bool leaves_room(int64_t pages) const;
  bool make_room(Request& r, int64_t total_pages);
  void preempt(Request& r);
  void add_decode(StepPlan& plan, Request& r, int drafts);
  void add_prefill(StepPlan& plan, Request& r);
  void add_group(StepPlan& plan, Request& r, RowGroup g);
  int running() const;

  const CoreConfig& config_;
  Pools& pools_;
  Backend& backend_;
  std::deque<std::unique_ptr<Request>> requests_;  // oldest first
  int64_t step_ = 0;
  bool begun_ = false;                             // begin_step() without its plan()
  std::vector<std::pair<RequestId, int>> wanted_;  // what begin_step() has settled: who may draft
};

}  // namespace oasis
