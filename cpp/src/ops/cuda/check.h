// CUDA errors and unsupported shapes as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace oasis::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next launch that is checked would report this error again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

[[noreturn]] inline void refuse(const char* field, long long value, const char* rule) {
  throw std::invalid_argument(std::string(field) + " = " + std::to_string(value) + ": must be " +
                              rule);
}

}  // namespace oasis::cuda
