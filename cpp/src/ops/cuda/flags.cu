// set_flags: a thread a flag. wait_flags: one warp, a lane a flag, that looks every 0.1 us or so;
// then a lane a request that it is counted for.
#include "ops/cuda/flags.h"

#include "ops/cuda/check.h"
#include "ops/cuda/flags.cuh"
#include "ops/cuda/ops.h"

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
    wait_kernel(const int64_t* flags, int count, const int64_t* step, int64_t value, Waiting w) {
  const int64_t wanted = step ? *step - 1 : value;
  const int lane = threadIdx.x;
  const uint64_t begin = now_ns();
  bool waited = false;
  while (lane < count && load_acquire(flags + lane) < wanted) {
    waited = true;
    if (now_ns() - begin > kDeadlineNs) __trap();
    __nanosleep(100);
  }
  if (!__any_sync(~0u, waited) || !w.predictors) return;
  const uint64_t ns = now_ns() - begin;
  for (int i = lane; i < *w.count; i += 32)
    atomicAdd(reinterpret_cast<unsigned long long*>(w.stats + 4ll * w.predictors[i].request + 3),
              static_cast<unsigned long long>(ns));
}

// Else an SM that runs one alone may be set up with little shared memory, and would keep gathers
// and products, which need much, out of it as long as it waits.
template <class Kernel>
cudaError_t leave_shared_memory(Kernel* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace

void set_flags(int64_t* flags, int count, const int64_t* step, int64_t value, cudaStream_t stream) {
  static const cudaError_t set_up = leave_shared_memory(set_kernel);
  check(set_up, "set_flags");
  set_kernel<<<1, 128, 0, stream>>>(flags, count, step, value);
  check(cudaGetLastError(), "set_flags");
}

void wait_flags(const int64_t* flags, int count, const int64_t* step, int64_t value,
                const Waiting& waiting, cudaStream_t stream) {
  if (count < 1 || count > 32) refuse("wait_flags: count", count, "1 to 32");
  static const cudaError_t set_up = leave_shared_memory(wait_kernel);
  check(set_up, "wait_flags");
  wait_kernel<<<1, 32, 0, stream>>>(flags, count, step, value, waiting);
  check(cudaGetLastError(), "wait_flags");
}

}  // namespace oasis::cuda
