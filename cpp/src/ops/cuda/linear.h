// Matrix products by cuBLASLt: y = x W^T (+ bias), float32 accumulation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// One a device and thread of launches. Algorithms are chosen once for each (shape, SMs): from
// cuBLASLt's heuristic, or by timing its candidates with `tune`. All products share one workspace,
// captured ones too: whatever runs them, eagerly or as a graph, must run them one after the other,
// that is on one stream. Run or tune a problem once before it is captured: the first call may
// allocate and load code.
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
    int sms;                 // the product is to use; 0: all
    bool float_out = false;  // y and bias are float32 whatever dtype is
    // 0: a row's result may depend on how many rows there are (another count, another algorithm).
    // Else it depends on that row alone: products of exactly that many rows by one algorithm that
    // splits no sum, the last one from a copy of its rows and into a copy of its results. All
    // counts share what `tune` has chosen.
    int fixed_rows = 0;
    auto operator<=>(const Problem&) const = default;
  };

  // x [rows][k], weight [n][k], bias [n] or null, y [rows][n]. Only enqueues, so it may be
  // captured.
  void run(const Problem& p, const void* x, const void* weight, const void* bias, void* y,
           cudaStream_t stream);
  // Times the candidates and keeps the fastest; returns its microseconds. Each of `repeats` runs
  // goes over all the weights: enough of them that they do not stay in the cache. Waits for the
  // stream.
  float tune(const Problem& p, const void* x, const std::vector<const void*>& weights,
             const void* bias, void* y, int repeats, cudaStream_t stream);

 private:
  struct Plan;
  Plan& plan(Problem p);
  void multiply(Plan& plan, int candidate, const void* x, const void* weight, const void* bias,
                void* y, cudaStream_t stream);
  void run(Plan& plan, int candidate, int64_t rows, const void* x, const void* weight,
           const void* bias, void* y, cudaStream_t stream);

  void* handle_ = nullptr;  // cublasLtHandle_t
  void* workspace_ = nullptr;
  std::map<Problem, std::unique_ptr<Plan>> plans_;
};

}  // namespace oasis::cuda
