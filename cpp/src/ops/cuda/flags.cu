// set_flags: a thread a flag. wait_flags: one warp, a lane a flag, that looks every 0.1 us or so.
#include "ops/cuda/flags.h"

#include "ops/cuda/check.h"
#include "ops/cuda/flags.cuh"

namespace oasis::cuda {
namespace {

constexpr uint64_t kDeadlineNs = 120'000'000'000;

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void set_kernel(int64_t* flags, int count, const int64_t* step, int64_t value) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    store_release(flags + i, step ? *step : value);
}

__global__ void __launch_bounds__(32)
    wait_kernel(const int64_t* flags, int count, const int64_t* step, int64_t value) {
  if (static_cast<int>(threadIdx.x) >= count) return;
  const int64_t wanted = step ? *step - 1 : value;
  const uint64_t begin = now_ns();
  while (load_acquire(flags + threadIdx.x) < wanted) {
    if (now_ns() - begin > kDeadlineNs) __trap();
    __nanosleep(100);
  }
}

}  // namespace

void set_flags(int64_t* flags, int count, const int64_t* step, int64_t value, cudaStream_t stream) {
  set_kernel<<<1, 128, 0, stream>>>(flags, count, step, value);
  check(cudaGetLastError(), "set_flags");
}

void wait_flags(const int64_t* flags, int count, const int64_t* step, int64_t value,
                cudaStream_t stream) {
  if (count < 1 || count > 32) refuse("wait_flags: count", count, "1 to 32");
  wait_kernel<<<1, 32, 0, stream>>>(flags, count, step, value);
  check(cudaGetLastError(), "wait_flags");
}

}  // namespace oasis::cuda
