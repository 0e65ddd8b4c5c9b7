// Descriptions of tensors for Hopper's copy engine.
#pragma once

#include <cuda.h>

#include "ops/cuda/ops.h"

namespace oasis::cuda {

// One layer's pool, of `pages` pages of 16-bit elements. Coordinates: [element of 64][token of
// 8][half of the head, or the only one][8 tokens of the page, KV head, K or V: in the order of
// memory]; a box is one page's K or V of a head. In shared memory it becomes [8 tokens][half] of
// atoms of 8 rows of 128 bytes (hopper.cuh).
CUtensorMap page_map(const void* pool, int64_t pages, const Heads& heads);

}  // namespace oasis::cuda
