// sparsify: one CTA a (head, layer). Bytes: each block-head that moves, read and written once.
// list_copies: one thread a copy. Both run between steps, once in a request's life or preemption.
#include "ops/cuda/check.h"
#include "ops/cuda/moves.h"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sparsify_kernel(Sparsify s, int head_bytes) {
  extern __shared__ int32_t sources[];  // [slots]: the block that goes into each slot
  const int head = blockIdx.x, layer = blockIdx.y, h = s.heads.num_kv_heads;
  const int64_t map = layer * s.map_stride + static_cast<int64_t>(head) * s.top_k;
  const int32_t* keep = s.first_choice + map;  // ascending
  for (int i = threadIdx.x; i < s.slots; i += kThreads) sources[i] = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < s.slots; i += kThreads)
    if (keep[i] < s.slots) sources[keep[i]] = keep[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    int from = 0;
    while (from < s.slots && keep[from] < s.slots) ++from;
    for (int i = 0; i < s.slots; ++i)
      if (sources[i] < 0) sources[i] = keep[from++];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < s.slots; i += kThreads) {
    s.slot_blocks[map + i] = sources[i];
    s.slot_steps[map + i] = static_cast<int32_t>(s.step);
  }
  char* pool = static_cast<char*>(s.pool) + layer * s.layer_bytes;
  auto place = [&](int block) {
    return reinterpret_cast<int4*>(pool +
                                   (static_cast<int64_t>(s.pages[block]) * h + head) * head_bytes);
  };
  for (int i = 0; i < s.slots; ++i) {
    if (sources[i] == i) continue;
    const int4* from = place(sources[i]);
    int4* to = place(i);
    for (int k = threadIdx.x; k < head_bytes / 16; k += kThreads) to[k] = from[k];
  }
}

__global__ void __launch_bounds__(kThreads) list_copies_kernel(ListCopies l, int head_bytes) {
  const int h = l.heads.num_kv_heads, head = blockIdx.y % h, layer = blockIdx.y / h;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= l.count) return;
  const int block = l.blocks
                        ? l.blocks[layer * l.map_stride + static_cast<int64_t>(head) * l.top_k + i]
                        : l.first_block + i;
  const int64_t unit = l.host_units[static_cast<int64_t>(block) * l.layers + layer];
  char* host =
      const_cast<char*>(static_cast<const char*>(l.host_base)) + (unit * h + head) * head_bytes;
  char* device = static_cast<char*>(l.pool) + layer * l.layer_bytes +
                 (static_cast<int64_t>(l.pages[i]) * h + head) * head_bytes;
  l.copies[static_cast<int64_t>(blockIdx.y) * l.count + i] =
      l.to_device ? Copy{host, device} : Copy{device, host};
}

}  // namespace

void sparsify(const Sparsify& s, cudaStream_t stream) {
  if (s.slots > kMostSlots) refuse("sparsify: slots", s.slots, "at most 12288");
  const int bytes = s.slots * static_cast<int>(sizeof(int32_t));
  sparsify_kernel<<<dim3(s.heads.num_kv_heads, s.layers), kThreads, bytes, stream>>>(
      s, 2 * kBlockTokens * s.heads.head_dim * s.element_bytes);
  check(cudaGetLastError(), "sparsify");
}

void list_copies(const ListCopies& l, cudaStream_t stream) {
  if (l.count == 0) return;
  list_copies_kernel<<<dim3((l.count + kThreads - 1) / kThreads, l.heads.num_kv_heads * l.layers),
                       kThreads, 0, stream>>>(
      l, 2 * kBlockTokens * l.heads.head_dim * l.element_bytes);
  check(cudaGetLastError(), "list_copies");
}

}  // namespace oasis::cuda
