// Block-heads from pinned host memory into device pages, or the other way.
//
// Grid: num_ctas of one warp. One thread moves runs by cp.async.bulk: host-mapped source -> shared
// memory -> device, kAhead runs of at most kRun bytes on their way in, as many on their way out.
// Few SMs feed the link, so that the foreground keeps the others; and what all have in flight
// should be little more than what fills the link (some 200 KB, more while others saturate the
// memory): the rest waits in queues that every kernel's accesses share.
//
// Bytes: each block-head once over the link. Floor: those bytes / what a pinned copy of the same
// size reaches; about 21 GB/s a CTA.
#include "ops/cuda/check.h"
#include "ops/cuda/flags.cuh"
#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kRun = 8192;

__device__ void wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

template <int kAhead>
__global__ void __launch_bounds__(32)
    gather_kernel(const Copy* copies, const int32_t* num_copies, int bytes, DoneFlag done) {
  constexpr int kStages = 2 * kAhead;
  extern __shared__ __align__(128) char stages[];
  __shared__ alignas(8) uint64_t barriers[kStages];
  if (threadIdx.x != 0) return;
  const uint32_t stage0 = shared_address(stages), barrier0 = shared_address(barriers);
  for (int s = 0; s < kStages; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier0 + 8 * s) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");

  const int run = bytes < kRun ? bytes : kRun, runs_each = bytes / run;
  const int64_t total = static_cast<int64_t>(*num_copies) * runs_each;
  const int64_t mine =
      (total - blockIdx.x + gridDim.x - 1) / gridDim.x;  // runs blockIdx.x, + gridDim.x, ...
  auto at = [&](int64_t i, const char*& from, char*& to) {
    const int64_t r = blockIdx.x + i * gridDim.x;
    const Copy c = copies[r / runs_each];
    const int64_t offset = r % runs_each * run;
    from = static_cast<const char*>(c.from) + offset;
    to = static_cast<char*>(c.to) + offset;
  };
  auto fetch = [&](int64_t i) {
    const char* from;
    char* to;
    at(i, from, to);
    const int s = static_cast<int>(i % kStages);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier0 + 8 * s),
                 "r"(run)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(stage0 + s * kRun),
        "l"(from), "r"(run), "r"(barrier0 + 8 * s)
        : "memory");
  };
  // A stage is fetched into again once the store that read it has: half of the stages are being
  // read, half written.
  for (int64_t i = 0; i < kAhead && i < mine; ++i) fetch(i);
  for (int64_t i = 0; i < mine; ++i) {
    wait(barrier0 + 8 * static_cast<uint32_t>(i % kStages), static_cast<uint32_t>(i / kStages & 1));
    const char* from;
    char* to;
    at(i, from, to);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(stage0 + static_cast<uint32_t>(i % kStages) * kRun), "r"(run)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (i + kAhead < mine) {
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kAhead) : "memory");
      fetch(i + kAhead);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  arrive(done);
}

}  // namespace

void gather(const Copy* copies, const int32_t* num_copies, int bytes, int num_ctas, int in_flight,
            const DoneFlag& done, cudaStream_t stream) {
  if (bytes % 16 || (bytes > kRun && bytes % kRun))
    refuse("gather: bytes", bytes, "a multiple of 16, and of 8192 above that");
  auto launch = [&]<int kAhead>() {
    static const cudaError_t allowed = cudaFuncSetAttribute(
        gather_kernel<kAhead>, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * kAhead * kRun);
    check(allowed, "gather: shared memory");
    gather_kernel<kAhead>
        <<<num_ctas, 32, 2 * kAhead * kRun, stream>>>(copies, num_copies, bytes, done);
    check(cudaGetLastError(), "gather");
  };
  switch (in_flight) {
    case 2:
      return launch.operator()<2>();
    case 4:
      return launch.operator()<4>();
    case 6:
      return launch.operator()<6>();
    case 8:
      return launch.operator()<8>();
    default:
      refuse("gather: in_flight", in_flight, "2, 4, 6 or 8");
  }
}

}  // namespace oasis::cuda
