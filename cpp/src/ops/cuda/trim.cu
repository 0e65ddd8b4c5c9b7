// One thread a request; a few bytes each.
#include "ops/cuda/check.h"
#include "ops/cuda/trim.h"

namespace oasis::cuda {
namespace {

__global__ void trim_kernel(Trim t) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= *t.num_drafted) return;
  const Drafted d = t.drafted[i];
  const int used = min(max(t.draft_counts[d.request], 0), d.drafts);
  t.used[i] = used;
  if (used == d.drafts) return;
  for (int r = 1 + used; r <= d.drafts; ++r) t.rows[d.row0 + r] = {-1, 0, -1, 0, 0};
  t.segments[d.segment].rows = 1 + used;
  if (d.predictor < 0) return;
  t.predictors[d.predictor].staged_rows = max(used, 1);
  if (used == 0) t.rows[d.row0].staged = d.staged0;
}

}  // namespace

void trim(const Trim& t, int max_drafted, cudaStream_t stream) {
  if (max_drafted == 0) return;
  trim_kernel<<<(max_drafted + 63) / 64, 64, 0, stream>>>(t);
  check(cudaGetLastError(), "trim");
}

}  // namespace oasis::cuda
