// Matrix products by cuBLASLt: y = x W^T (+ bias), float32 accumulation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// One a device and thread of launches. Algorithms are chosen once for each (shape, SMs): from
// cuBLASLt's heuristic, or by timing its candidates with `tune`. A row's result may depend on how
// many rows there are: another count, another algorithm.
class Linear {
 public:
  Linear();
  ~Linear();
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  struct Problem {
    DType dtype;
    int64_t rows, n, k;
    bool bias;
    int sms;  // the product is to use; 0: all
    auto operator<=>(const Problem&) const = default;
  };

  // x [rows][k], weight [n][k], bias [n] or null, y [rows][n]. Only enqueues, so it may be
  // captured.
  void run(const Problem& p, const void* x, const void* weight, const void* bias, void* y,
           cudaStream_t stream);
  // Times the candidates on these arrays and keeps the fastest; returns its microseconds. Waits for
  // the stream.
  float tune(const Problem& p, const void* x, const void* weight, const void* bias, void* y,
             int repeats, cudaStream_t stream);

 private:
  struct Plan;
  Plan& plan(const Problem& p);
  void run(Plan& plan, int candidate, const void* x, const void* weight, const void* bias, void* y,
           cudaStream_t stream);

  void* handle_ = nullptr;  // cublasLtHandle_t
  void* workspace_ = nullptr;
  std::map<Problem, std::unique_ptr<Plan>> plans_;
};

}  // namespace oasis::cuda
