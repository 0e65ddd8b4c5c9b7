// Order between kernels of different steps that no stream and no graph has an edge for: a flag in
// device memory holds the last step that is done.
//
// An external event would do the same, but each in a captured step costs the host some 2 to 12 us
// of its launch, and a flag nothing. A kernel that waits must never keep from running what it waits
// for: it is one warp, and all that it waits for was launched before it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oasis::cuda {

struct Predictor;

// Whom a wait is counted for: the requests of predictors[*count].
struct Waiting {
  const Predictor* predictors;  // null: nobody
  const int32_t* count;
  int64_t* stats;  // [request][4], as Select's: adds to the last, in nanoseconds
};

// A flag as a kernel of several CTAs sets it, when its last one ends.
struct DoneFlag {
  int64_t* flag;        // null: none
  int32_t* arrivals;    // zero between launches
  const int64_t* step;  // what the flag is set to
};

// flags[count] = *step, or `value` where step is null.
void set_flags(int64_t* flags, int count, const int64_t* step, int64_t value, cudaStream_t stream);

// What follows in the stream runs once each of flags[count], at most 32, is *step - 1 or more, or
// `value` or more where step is null. A wait of two minutes is a fault of the device.
void wait_flags(const int64_t* flags, int count, const int64_t* step, int64_t value,
                const Waiting& waiting, cudaStream_t stream);

}  // namespace oasis::cuda
