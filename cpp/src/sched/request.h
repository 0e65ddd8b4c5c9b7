// A request as the scheduler sees it: lengths and a state, no tokens.
#pragma once

#include <memory>

#include "kv/sequence.h"

namespace oasis {

enum class RequestState { kWaiting, kPrefill, kDecode, kPreempted };

struct Request {
  RequestId id = 0;
  int64_t prompt_tokens = 0;
  int64_t max_new_tokens = 0;
  RequestState state = RequestState::kWaiting;
  RequestState resume_to = RequestState::kPrefill;
  int64_t tokens = 0;     // known tokens: the prompt and what was generated; KV exists for seq->committed of them
  int64_t last_step = 0;  // the last step that names it
  bool sparsify = false;  // the last step selected first
  std::unique_ptr<SequenceKv> seq;

  int64_t max_tokens() const { return prompt_tokens + max_new_tokens; }
  bool running() const { return state == RequestState::kPrefill || state == RequestState::kDecode; }
};

}  // namespace oasis
