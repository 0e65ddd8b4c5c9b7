#include "ops/cuda/linear.h"

#include <cublasLt.h>

#include <vector>

#include "ops/cuda/check.h"

namespace oasis::cuda {
namespace {

constexpr size_t kWorkspaceBytes = 32 << 20;
constexpr int kCandidates = 8;

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(status));
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::kFloat32   ? CUDA_R_32F
         : dtype == DType::kFloat16 ? CUDA_R_16F
                                    : CUDA_R_16BF;
}

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

// cuBLASLt's matrices are column-major: y^T [n][rows] = W [n][k] x^T [k][rows].
struct Linear::Plan {
  int64_t rows, x_row_bytes, y_row_bytes;
  // fixed_rows: [rows] for a last, smaller product; what the rows beyond hold reaches no other row.
  void *last_x = nullptr, *last_y = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  std::vector<cublasLtMatmulAlgo_t> candidates;
  int chosen = 0;

  ~Plan() {
    cudaFree(last_x);
    cudaFree(last_y);
    if (y) cublasLtMatrixLayoutDestroy(y);
    if (x) cublasLtMatrixLayoutDestroy(x);
    if (weight) cublasLtMatrixLayoutDestroy(weight);
    if (operation) cublasLtMatmulDescDestroy(operation);
  }
};

Linear::Linear() {
  cublasLtHandle_t handle;
  check(cublasLtCreate(&handle), "cublasLtCreate");
  handle_ = handle;
  check(cudaMalloc(&workspace_, kWorkspaceBytes), "linear: workspace");
}

Linear::~Linear() {
  plans_.clear();
  cudaFree(workspace_);
  cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

Linear::Plan& Linear::plan(Problem p) {
  const bool fixed = p.fixed_rows > 0;
  if (fixed) p.rows = p.fixed_rows;
  if (const auto at = plans_.find(p); at != plans_.end()) return *at->second;
  auto made = std::make_unique<Plan>();
  const DType out = p.float_out ? DType::kFloat32 : p.dtype;
  made->rows = p.rows;
  made->x_row_bytes = p.k * bytes_of(p.dtype);
  made->y_row_bytes = p.n * bytes_of(out);
  check(cublasLtMatmulDescCreate(&made->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "linear: description");
  auto set = [&](cublasLtMatmulDescAttributes_t name, auto value) {
    check(cublasLtMatmulDescSetAttribute(made->operation, name, &value, sizeof value),
          "linear: attribute");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (p.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  if (p.sms > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, static_cast<int32_t>(p.sms));
  check(cublasLtMatrixLayoutCreate(&made->weight, type_of(p.dtype), p.k, p.n, p.k),
        "linear: weight");
  check(cublasLtMatrixLayoutCreate(&made->x, type_of(p.dtype), p.k, p.rows, p.k), "linear: x");
  check(cublasLtMatrixLayoutCreate(&made->y, type_of(out), p.n, p.rows, p.n), "linear: y");

  cublasLtMatmulPreference_t preference;
  check(cublasLtMatmulPreferenceCreate(&preference), "linear: preference");
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value),
          "linear: preference");
  };
  // Without a workspace no sum over k can be split among CTAs, save by adding up in y, which the
  // mask excludes. Rows may begin at any multiple of 16 bytes.
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, fixed ? size_t{0} : kWorkspaceBytes);
  if (fixed) {
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    for (auto name :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(name, uint32_t{16});
  }
  cublasLtMatmulHeuristicResult_t found[kCandidates];
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      static_cast<cublasLtHandle_t>(handle_), made->operation, made->weight, made->x, made->y,
      made->y, preference, kCandidates, found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  check(status, "linear: no algorithm for this shape");
  for (int i = 0; i < count; ++i) made->candidates.push_back(found[i].algo);
  if (count == 0) refuse("linear: n", p.n, "a shape that cuBLASLt has an algorithm for");
  if (fixed) {
    check(cudaMalloc(&made->last_x, p.rows * made->x_row_bytes), "linear: last rows");
    check(cudaMalloc(&made->last_y, p.rows * made->y_row_bytes), "linear: last rows");
  }
  return *plans_.emplace(p, std::move(made)).first->second;
}

void Linear::multiply(Plan& plan, int candidate, const void* x, const void* weight,
                      const void* bias, void* y, cudaStream_t stream) {
  if (bias)
    check(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                         sizeof bias),
          "linear: bias");
  const float one = 1.0f, zero = 0.0f;
  check(cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), plan.operation, &one, weight,
                       plan.weight, x, plan.x, &zero, y, plan.y, y, plan.y,
                       &plan.candidates[candidate], workspace_, kWorkspaceBytes, stream),
        "linear");
}

void Linear::run(Plan& plan, int candidate, int64_t rows, const void* x, const void* weight,
                 const void* bias, void* y, cudaStream_t stream) {
  auto from = static_cast<const char*>(x);
  auto to = static_cast<char*>(y);
  for (; rows >= plan.rows; rows -= plan.rows) {
    multiply(plan, candidate, from, weight, bias, to, stream);
    from += plan.rows * plan.x_row_bytes;
    to += plan.rows * plan.y_row_bytes;
  }
  if (rows == 0) return;
  check(
      cudaMemcpyAsync(plan.last_x, from, rows * plan.x_row_bytes, cudaMemcpyDeviceToDevice, stream),
      "linear: last rows");
  multiply(plan, candidate, plan.last_x, weight, bias, plan.last_y, stream);
  check(cudaMemcpyAsync(to, plan.last_y, rows * plan.y_row_bytes, cudaMemcpyDeviceToDevice, stream),
        "linear: last rows");
}

void Linear::run(const Problem& p, const void* x, const void* weight, const void* bias, void* y,
                 cudaStream_t stream) {
  if (p.rows == 0) return;
  Plan& made = plan(p);
  run(made, made.chosen, p.rows, x, weight, bias, y, stream);
}

float Linear::tune(const Problem& p, const void* x, const std::vector<const void*>& weights,
                   const void* bias, void* y, int repeats, cudaStream_t stream) {
  Plan& made = plan(p);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "linear: event");
  check(cudaEventCreate(&end), "linear: event");
  float best = 0.0f;
  for (int c = 0; c < static_cast<int>(made.candidates.size()); ++c) {
    run(made, c, p.rows, x, weights[0], bias, y, stream);  // loads its module
    check(cudaEventRecord(begin, stream), "linear: event");
    for (int i = 0; i < repeats; ++i)
      for (const void* weight : weights) run(made, c, p.rows, x, weight, bias, y, stream);
    check(cudaEventRecord(end, stream), "linear: event");
    check(cudaEventSynchronize(end), "linear: tuning");
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end), "linear: event");
    if (c == 0 || ms < best) best = ms, made.chosen = c;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best * 1e3f / static_cast<float>(repeats * weights.size());
}

}  // namespace oasis::cuda
