// What the scheduler and the core ask of the data: the memory behind the ids, and everything that
// moves or computes in it. The scheduler knows ids and lengths, a backend what lies there; neither
// does the other's work. One thread calls it.
//
// What a call enqueues or leaves to workers is ordered before whatever later calls do to the same
// memory: a page or unit may be handed on as soon as the call has returned.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/step_plan.h"
#include "pipeline/trace.h"

namespace oasis {

// Of one request so far; block-heads over layers, heads and sparse steps.
struct LookaheadStats {
  int64_t predicted = 0, admitted = 0, capped = 0;
  int64_t bytes_fetched = 0;
  double stall_ms = 0;  // that its steps waited for transfers of the step before
};

class Backend {
 public:
  virtual ~Backend() = default;

  // The sequence has its row, units and pages; what they held before is nobody's, but for the units
  // of the blocks that it begins with: those come to their pages, and are summarised.
  virtual void admit(const SequenceKv& seq) = 0;
  // It is about to turn sparse by the first selection that it made in `step`, of `complete` blocks:
  // moves what stays into its slots. Before SequenceKv::turn_sparse.
  virtual void sparsify(const SequenceKv& seq, int64_t complete, int64_t step) = 0;
  // Its open blocks go to their host units, which are final for those that are complete. Before
  // SequenceKv::give_back_pages, or the end of a sequence whose blocks are kept.
  virtual void save(const SequenceKv& seq) = 0;
  // The other way round, and refetches what was resident. After SequenceKv::take_pages_back.
  virtual void restore(const SequenceKv& seq) = 0;
  // Its ids are about to go back, in whatever state it is.
  virtual void release(const SequenceKv& seq) = 0;

  // A step: begin, then each layer once, in order; or abort in between. A null `out`, on CUDA only:
  // rows are appended and predict, nothing attends.
  virtual void begin(std::shared_ptr<const StepPlan> plan) = 0;
  virtual void forward(int layer, const void* qkv, void* out) = 0;
  virtual void abort() = 0;

  // As of `step`, one of the last two of which all layers ran; waits for its background.
  virtual LookaheadStats stats(const SequenceKv& seq, int64_t step) = 0;
  virtual std::vector<TraceRecord> take_trace() = 0;  // after drain()
  // Until nothing is under way; throws what the background threw.
  virtual void drain() = 0;
};

}  // namespace oasis
