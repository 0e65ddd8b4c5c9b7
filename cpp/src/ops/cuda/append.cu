// Where a step's rows enter the cache: RoPE, K and V into their pages, predicting queries into the
// staging buffer; and where blocks that are complete leave the open page: summary, fill slot, host.
//
// append: CTAs of a warp a (row, head), then CTAs of a (block, head) that settles. Bytes: each
// row's q, k, v read and written once. write_through: one warp at a time a (layer, block, head).
// All are small beside attention: a block-head completes every 16 steps.
#include "ops/cuda/check.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

template <class T, int D>
__device__ void append_rows(const Append& a, int rows) {
  constexpr int kPairs = D / 64;  // of (d, d + D / 2) a thread
  const int h = a.heads.num_kv_heads, hq = h * a.heads.group, all = hq + 2 * h;
  const int unit = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (unit == 0 && lane == 0) *a.num_copies = 0;
  if (unit >= rows * all) return;
  const int row = unit / all, head = unit % all;
  const Row r = a.rows[row];
  if (r.position < 0) return;  // padding of a captured launch
  const T* from = static_cast<const T*>(a.qkv) + static_cast<int64_t>(unit) * D;
  float low[kPairs], high[kPairs];
  for (int i = 0; i < kPairs; ++i) {
    low[i] = Element<T>::to_float(from[lane + 32 * i]);
    high[i] = Element<T>::to_float(from[D / 2 + lane + 32 * i]);
  }
  const bool is_q = head < hq, is_k = !is_q && head < hq + h;
  const T* norm = static_cast<const T*>(is_q ? a.q_norm : is_k ? a.k_norm : nullptr);
  if (norm) {
    float squares = 0.0f;
    for (int i = 0; i < kPairs; ++i) squares += low[i] * low[i] + high[i] * high[i];
    const float inverse = rsqrtf(warp_sum(squares) / D + a.norm_eps);
    for (int i = 0; i < kPairs; ++i) {
      low[i] *= inverse * Element<T>::to_float(norm[lane + 32 * i]);
      high[i] *= inverse * Element<T>::to_float(norm[D / 2 + lane + 32 * i]);
    }
  }
  if (is_q || is_k)
    for (int i = 0; i < kPairs; ++i) {
      const float c = a.cos[static_cast<int64_t>(r.position) * (D / 2) + lane + 32 * i];
      const float s = a.sin[static_cast<int64_t>(r.position) * (D / 2) + lane + 32 * i];
      const float x = low[i], y = high[i];
      low[i] = x * c - y * s;
      high[i] = y * c + x * s;
    }
  auto store = [&](T* to) {
    for (int i = 0; i < kPairs; ++i) {
      to[lane + 32 * i] = Element<T>::from_float(low[i]);
      to[D / 2 + lane + 32 * i] = Element<T>::from_float(high[i]);
    }
  };
  if (is_q) {
    store(static_cast<T*>(a.q) + (static_cast<int64_t>(row) * hq + head) * D);
    if (r.staged >= 0)
      store(static_cast<T*>(a.staged) + (static_cast<int64_t>(r.staged) * hq + head) * D);
    return;
  }
  const int kv_head = (head - hq) % h;
  T* block =
      static_cast<T*>(a.pool) + (static_cast<int64_t>(r.page) * h + kv_head) * 2 * kBlockTokens * D;
  store(block + ((is_k ? 0 : kBlockTokens) + r.position % kBlockTokens) * D);
}

// A thread a dimension of the keys.
template <class T, int D>
__device__ void summarize(const Settle& s, const SettledBlock& b, int h, int head, const T* page) {
  const int d = threadIdx.x;
  float keys[kBlockTokens], first = 0.0f, second = 0.0f, top = -INFINITY, bottom = INFINITY;
  for (int t = 0; t < kBlockTokens; ++t) {
    keys[t] = Element<T>::to_float(page[t * D + d]);
    (t < kBlockTokens / 2 ? first : second) += keys[t];
    top = fmaxf(top, keys[t]);
    bottom = fminf(bottom, keys[t]);
  }
  const float mean = (first + second) / kBlockTokens;
  float variance = 0.0f;
  for (float k : keys) variance += (k - mean) * (k - mean);
  const int64_t summary_page = s.summary_pages[static_cast<int64_t>(b.request) * s.summary_stride +
                                               b.block / kSummaryBlocks];
  T* summary = static_cast<T*>(s.summaries) +
               ((summary_page * h + head) * kSummaryBlocks + b.block % kSummaryBlocks) * 2 * D;
  const bool std = s.kind == SummaryKind::kMeanStd, extremes = s.kind == SummaryKind::kMinMax;
  constexpr float kHalf = kBlockTokens / 2;
  summary[d] = Element<T>::from_float(std ? mean : extremes ? top : first / kHalf);
  summary[D + d] = Element<T>::from_float(std        ? sqrtf(variance / kBlockTokens)
                                          : extremes ? bottom
                                                     : second / kHalf);
}

template <class T, int D>
__device__ void settle(const Append& a, const Settle& s, int unit) {
  const int h = a.heads.num_kv_heads, head = unit % h, d = threadIdx.x;
  if (unit / h >= *s.num_blocks) return;
  const SettledBlock b = s.blocks[unit / h];
  T* pool = static_cast<T*>(a.pool);
  const T* page = pool + (static_cast<int64_t>(b.page) * h + head) * 2 * kBlockTokens * D;
  if (d < D) summarize<T, D>(s, b, h, head, page);
  if (b.slots < 0) return;  // dense: the block stays where it is

  // The fill slot: the next unused one, else the least recently selected, then the lower block.
  __shared__ uint64_t best[kWarps];
  __shared__ int slot;
  const int64_t map = (static_cast<int64_t>(b.request) * h + head) * s.top_k;
  if (b.grows) {
    if (d == 0) slot = b.slots;
  } else {
    uint64_t mine = ~0ull;
    for (int i = d; i < b.slots; i += kThreads) {
      const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(s.slot_steps[map + i]))
                               << 32 |
                           static_cast<uint32_t>(s.slot_blocks[map + i]);
      mine = key < mine ? key : mine;
    }
    for (int i = 16; i > 0; i /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, mine, i);
      mine = other < mine ? other : mine;
    }
    if (d % 32 == 0) best[d / 32] = mine;
    __syncthreads();
    for (uint64_t other : best) mine = other < mine ? other : mine;
    for (int i = d; i < b.slots; i += kThreads)
      if (s.slot_blocks[map + i] == static_cast<int32_t>(mine)) slot = i;
  }
  __syncthreads();
  if (d == 0) {
    s.slot_blocks[map + slot] = b.block;
    s.slot_steps[map + slot] = static_cast<int32_t>(*s.step);
  }
  const int64_t to_page = s.slot_pages[static_cast<int64_t>(b.request) * s.slot_stride + slot];
  const int4* from = reinterpret_cast<const int4*>(page);
  int4* to = reinterpret_cast<int4*>(pool + (to_page * h + head) * 2 * kBlockTokens * D);
  for (int i = d; i < 2 * kBlockTokens * D * static_cast<int>(sizeof(T)) / 16; i += kThreads)
    to[i] = from[i];
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads)
    append_kernel(Append a, int rows, int row_ctas, Settle s) {
  const int cta = blockIdx.x;
  if (cta < row_ctas)
    append_rows<T, D>(a, rows);
  else
    settle<T, D>(a, s, cta - row_ctas);
}

__global__ void write_through_kernel(WriteThrough w, int head_bytes) {
  const int h = w.heads.num_kv_heads, each = *w.num_blocks * h, units = w.layers * each;
  const int warps = gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
  for (int unit = (blockIdx.x * blockDim.x + threadIdx.x) / 32; unit < units; unit += warps) {
    const int layer = unit / each, head = unit % h;
    const SettledBlock b = w.blocks[unit % each / h];
    const int64_t host =
        w.host_units[b.request * w.host_stride + static_cast<int64_t>(b.block) * w.host_step +
                     w.host_offset + layer];
    const int4* from =
        reinterpret_cast<const int4*>(static_cast<const char*>(w.pool) + layer * w.layer_bytes +
                                      (static_cast<int64_t>(b.page) * h + head) * head_bytes);
    int4* to =
        reinterpret_cast<int4*>(static_cast<char*>(w.host_base) + (host * h + head) * head_bytes);
    for (int i = lane; i < head_bytes / 16; i += 32) __stcs(to + i, from[i]);
  }
}

}  // namespace

void append(const Append& a, int rows, const Settle& s, int max_blocks, cudaStream_t stream) {
  const int units = rows * (a.heads.group + 2) * a.heads.num_kv_heads;
  const int row_ctas = (units + kWarps - 1) / kWarps;
  const int ctas = row_ctas + max_blocks * a.heads.num_kv_heads;
  if (ctas == 0) return;
  auto launch = [&]<class T>(T) {
    if (a.heads.head_dim == 64)
      append_kernel<T, 64><<<ctas, kThreads, 0, stream>>>(a, rows, row_ctas, s);
    else if (a.heads.head_dim == 128)
      append_kernel<T, 128><<<ctas, kThreads, 0, stream>>>(a, rows, row_ctas, s);
    else
      refuse("head_dim", a.heads.head_dim, "64 or 128");
  };
  if (a.dtype == DType::kFloat32) launch(float{});
  if (a.dtype == DType::kFloat16) launch(Half{});
  if (a.dtype == DType::kBFloat16) launch(BFloat16{});
  check(cudaGetLastError(), "append");
}

void write_through(const WriteThrough& w, int num_ctas, cudaStream_t stream) {
  const int head_bytes = 2 * kBlockTokens * w.heads.head_dim * w.element_bytes;
  write_through_kernel<<<num_ctas, kThreads, 0, stream>>>(w, head_bytes);
  check(cudaGetLastError(), "write_through");
}

}  // namespace oasis::cuda
