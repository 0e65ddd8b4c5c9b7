// Flags as kernels read and write them.
#pragma once

#include <cstdint>

#include "ops/cuda/flags.h"

namespace oasis::cuda {

__device__ inline void store_release(int64_t* to, int64_t value) {
  asm volatile("st.release.gpu.global.s64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ inline int64_t load_acquire(const int64_t* from) {
  int64_t value;
  asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// One thread of each CTA, at its end: the last of the grid's CTAs sets the flag.
__device__ inline void arrive(const DoneFlag& done) {
  if (!done.flag) return;
  __threadfence();
  if (atomicAdd(done.arrivals, 1) != static_cast<int>(gridDim.x) - 1) return;
  __threadfence();
  *done.arrivals = 0;
  store_release(done.flag, *done.step);
}

}  // namespace oasis::cuda
