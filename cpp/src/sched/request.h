// A request as the scheduler sees it: lengths and a state, no tokens.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kv/sequence.h"

namespace oasis {

enum class RequestState { kWaiting, kPrefill, kDecode, kPreempted };

// That a dense request has selected first, until it has the pages to turn sparse: which blocks, the
// backend knows. A preemption in between must not change it.
struct FirstChoice {
  int64_t complete = 0;  // blocks there were to choose from
  int64_t step = 0;      // the selecting step
};

struct Request {
  RequestId id = 0;
  int64_t prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  std::vector<BlockName>
      names;  // of the prompt's complete blocks; none: neither reuses nor leaves any
  RequestState state = RequestState::kWaiting;
  RequestState resume_to = RequestState::kPrefill;
  // Known tokens: the prompt and what was generated; KV exists for seq->committed of them.
  int64_t tokens = 0;
  bool grows = false;   // in the step at hand, a settled block gets a new slot
  bool broken = false;  // by a step that broke off
  std::optional<FirstChoice> first_choice;
  std::unique_ptr<SequenceKv> seq;

  int64_t max_tokens() const { return prompt_tokens + max_new_tokens; }
  // It has all its tokens and waits to be ended: the caller may learn late that it has.
  bool exhausted() const { return tokens >= max_tokens(); }
  bool running() const { return state == RequestState::kPrefill || state == RequestState::kDecode; }
};

}  // namespace oasis
