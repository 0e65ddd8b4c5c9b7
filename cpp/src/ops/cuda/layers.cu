// The per-row operations between the matrix products. One CTA a row; each element read and written
// once, 16 bytes a thread at a time. Floor: those bytes / memory bandwidth, or a launch where rows
// are few.
#include "ops/cuda/check.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// 16 bytes of T as floats.
template <class T>
struct Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  float x[kSize];
  __device__ void load(const T* from) {
    const int4 raw = *reinterpret_cast<const int4*>(from);
    const T* e = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = Element<T>::to_float(e[i]);
  }
  __device__ void store(T* to) const {
    int4 raw;
    T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kSize; ++i) e[i] = Element<T>::from_float(x[i]);
    *reinterpret_cast<int4*>(to) = raw;
  }
};

__device__ float cta_sum(float x) {
  __shared__ float parts[kWarps];
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = parts[0];
  for (int w = 1; w < kWarps; ++w) sum += parts[w];
  return sum;
}

// sum[row] = x[row] + residual[row], rounded to T as the next layers will read it; y[row] = sum /
// rms(sum) * weight.
template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const T* x, T* residual, const T* weight, T* y, int dim, float eps) {
  constexpr int kSize = Chunk<T>::kSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * dim;
  float squares = 0.0f;
  for (int i = threadIdx.x * kSize; i < dim; i += kThreads * kSize) {
    Chunk<T> a;
    a.load(x + row + i);
    if (residual) {
      Chunk<T> r;
      r.load(residual + row + i);
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        a.x[k] = Element<T>::to_float(Element<T>::from_float(a.x[k] + r.x[k]));
      a.store(residual + row + i);
    }
#pragma unroll
    for (int k = 0; k < kSize; ++k) squares += a.x[k] * a.x[k];
  }
  const float inverse = rsqrtf(cta_sum(squares) / dim + eps);
  for (int i = threadIdx.x * kSize; i < dim; i += kThreads * kSize) {
    Chunk<T> a, w;
    a.load((residual ? residual : x) + row + i);
    w.load(weight + i);
#pragma unroll
    for (int k = 0; k < kSize; ++k) a.x[k] *= inverse * w.x[k];
    a.store(y + row + i);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) silu_kernel(const T* gate_up, T* y, int inter) {
  constexpr int kSize = Chunk<T>::kSize;
  const int64_t row = blockIdx.y;
  const int i = (blockIdx.x * kThreads + threadIdx.x) * kSize;
  if (i >= inter) return;
  Chunk<T> gate, up;
  gate.load(gate_up + 2 * row * inter + i);
  up.load(gate_up + (2 * row + 1) * inter + i);
#pragma unroll
  for (int k = 0; k < kSize; ++k) gate.x[k] = gate.x[k] / (1.0f + expf(-gate.x[k])) * up.x[k];
  gate.store(y + row * inter + i);
}

template <class F>
void dispatch(DType dtype, F of, const char* what) {
  if (dtype == DType::kFloat32) of(float{});
  if (dtype == DType::kFloat16) of(Half{});
  if (dtype == DType::kBFloat16) of(BFloat16{});
  check(cudaGetLastError(), what);
}

}  // namespace

void add_rms_norm(DType dtype, const void* x, void* residual, const void* weight, void* y,
                  int64_t rows, int dim, float eps, cudaStream_t stream) {
  if (dim % 8) refuse("add_rms_norm: dim", dim, "a multiple of 8");
  if (rows == 0) return;
  dispatch(
      dtype,
      [&]<class T>(T) {
        norm_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
            static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
            static_cast<T*>(y), dim, eps);
      },
      "add_rms_norm");
}

void silu_mul(DType dtype, const void* gate_up, void* y, int64_t rows, int inter,
              cudaStream_t stream) {
  if (inter % 8) refuse("silu_mul: inter", inter, "a multiple of 8");
  if (rows == 0) return;
  dispatch(
      dtype,
      [&]<class T>(T) {
        const int each = kThreads * Chunk<T>::kSize;
        silu_kernel<T>
            <<<dim3((inter + each - 1) / each, static_cast<unsigned>(rows)), kThreads, 0, stream>>>(
                static_cast<const T*>(gate_up), static_cast<T*>(y), inter);
      },
      "silu_mul");
}

}  // namespace oasis::cuda
