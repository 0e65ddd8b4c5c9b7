// The float32 kernels that attention() and score() of ops.h choose.
#pragma once

#include "ops/cuda/ops.h"

namespace oasis::cuda {

void attention_float(const Attention& a, cudaStream_t stream);
void score_float(const Score& s, cudaStream_t stream);

}  // namespace oasis::cuda
