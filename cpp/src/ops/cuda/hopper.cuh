// Hopper's own instructions: barriers in shared memory, the bulk tensor copies that complete on
// them, and warpgroup matrix products. Matrices in shared memory are made of atoms of 8 rows of 128
// bytes, in which row r's 16-byte chunk c lies at c ^ r ("128-byte swizzle"): 1 KiB, aligned to it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/cuda/types.cuh"

namespace oasis::cuda {

constexpr int kAtomRows = 8, kAtomRowBytes = 128, kAtomBytes = kAtomRows * kAtomRowBytes;

// ---------------------------------------------------------------- barriers

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// After all are initialised: the copy engine sees them once the threads are synchronised.
__device__ inline void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase end only after `bytes` were copied.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits for the end of the phase of that parity; the phase before the first counts as ended.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Of some warps of the CTA, by a number of their own (0 is __syncthreads).
__device__ inline void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// What this thread wrote to shared memory is seen by copies and matrix products after the next
// barrier.
__device__ inline void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- copies

__device__ inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0,
                                int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// ---------------------------------------------------------------- registers

template <int N>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---------------------------------------------------------------- matrix products

// A matrix of atoms in shared memory. K contiguous: `stride` bytes from 8 rows to the next 8,
// `lead` unused. M or N contiguous (an atom's row is 64 of M or N at one k): `lead` bytes from 64
// to the next 64, `stride` bytes from 8 k to the next 8. `at` moves its beginning; all in multiples
// of 16.
struct Matrix {
  uint32_t low, high;
  __device__ Matrix(uint32_t address, uint32_t lead, uint32_t stride)
      : low(address >> 4 | lead >> 4 << 16), high(stride >> 4 | 1u << 30) {}
  __device__ uint64_t at(int bytes) const {
    return static_cast<uint64_t>(high) << 32 | (low + bytes / 16);
  }
};

// A product reads and writes its registers until a wait says that it is done. `hold` keeps the
// compiler from moving their other uses across the place where it stands.
template <int N>
__device__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ void hold(uint32_t (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N * 4; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define OASIS_8(d, i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OASIS_32(d, i) OASIS_8(d, i), OASIS_8(d, i + 8), OASIS_8(d, i + 16), OASIS_8(d, i + 24)
#define OASIS_NAMES_32                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OASIS_NAMES_64                                                                           \
  OASIS_NAMES_32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d[64][N] (+)= a[64][16] b[16][N] by a warpgroup, accumulated in float32 registers laid out like
// those of mma.m16n8k16: warp w of the group has the rows 16 w to 16 w + 15.
template <class T>
struct WarpgroupProduct;

#define OASIS_WARPGROUP_PRODUCT(T, TYPE)                                                          \
  template <>                                                                                     \
  struct WarpgroupProduct<T> {                                                                    \
    /* a and b in shared memory, K contiguous; N = 128; d is overwritten unless `add` */          \
    static __device__ void shared_shared(float (&d)[64], uint64_t a, uint64_t b, int add) {       \
      asm volatile(                                                                               \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                        \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" OASIS_NAMES_64        \
          "}, %64, %65, add, 1, 1, 0, 0;\n}"                                                      \
          : OASIS_32(d, 0), OASIS_32(d, 32)                                                       \
          : "l"(a), "l"(b), "r"(add));                                                            \
    }                                                                                             \
    /* a in registers like those of mma.m16n8k16, b in shared memory, N contiguous; adds to d */  \
    static __device__ void registers_shared(float (&d)[64], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile(                                                                               \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" OASIS_NAMES_64        \
          "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                        \
          : OASIS_32(d, 0), OASIS_32(d, 32)                                                       \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
    }                                                                                             \
    static __device__ void registers_shared(float (&d)[32], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile(                                                                               \
          "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" OASIS_NAMES_32         \
          "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"                                        \
          : OASIS_32(d, 0)                                                                        \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
    }                                                                                             \
  }
OASIS_WARPGROUP_PRODUCT(Half, "f16");
OASIS_WARPGROUP_PRODUCT(BFloat16, "bf16");
#undef OASIS_WARPGROUP_PRODUCT
#undef OASIS_NAMES_64
#undef OASIS_NAMES_32
#undef OASIS_32
#undef OASIS_8

}  // namespace oasis::cuda
