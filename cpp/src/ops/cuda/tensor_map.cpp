#include "ops/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "ops/cuda/check.h"

namespace oasis::cuda {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

// Through the runtime, so that nothing links against the driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
#else
  check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
#endif
  if (found != cudaDriverEntryPointSuccess || function == nullptr)
    throw std::runtime_error("cuTensorMapEncodeTiled: the driver lacks it");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap page_map(const void* pool, int64_t pages, const Heads& heads) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kAtomElements = 64, kAtomTokens = 8, kElementBytes = 2;
  constexpr cuuint32_t kPageAtoms = kBlockTokens / kAtomTokens;  // of K or V, in tokens
  const cuuint32_t halves = heads.head_dim / kAtomElements;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(heads.head_dim) * kElementBytes;
  const cuuint64_t sizes[] = {kAtomElements, kAtomTokens, halves,
                              static_cast<cuuint64_t>(pages) * heads.num_kv_heads * 2 * kPageAtoms};
  const cuuint64_t strides[] = {row_bytes, kAtomElements * kElementBytes, kAtomTokens * row_bytes};
  const cuuint32_t box[] = {kAtomElements, kAtomTokens, halves, kPageAtoms};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(pool), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(result));
  return map;
}

}  // namespace oasis::cuda
