// A plain read of device memory: what the read rates of the other kernels are held against.
//
// Grid: given. Each thread has four 16-byte loads in flight. Bytes: each byte once.
#include "ops/cuda/check.h"
#include "ops/cuda/ops.h"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 512, kUnroll = 4;

__global__ void __launch_bounds__(kThreads) read_kernel(const int4* from, int64_t count, int* out) {
  int4 x{};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += kUnroll * step) {
    int4 y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      y[u] = i + u * step < count ? __ldcs(from + i + u * step) : int4{};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      x.x ^= y[u].x;
      x.y ^= y[u].y;
      x.z ^= y[u].z;
      x.w ^= y[u].w;
    }
  }
  if ((x.x ^ x.y ^ x.z ^ x.w) == 0x5bd1e995) *out = 1;  // never dropped by the compiler
}

}  // namespace

void read(const void* from, int64_t bytes, int* out, int num_ctas, cudaStream_t stream) {
  read_kernel<<<num_ctas, kThreads, 0, stream>>>(static_cast<const int4*>(from), bytes / 16, out);
  check(cudaGetLastError(), "read");
}

}  // namespace oasis::cuda
