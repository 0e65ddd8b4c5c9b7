// Where a step's rows enter the cache: RoPE, K and V into their pages, predicting queries into the
// staging buffer; and where blocks that are complete leave the open page: summary, fill slot, host.
//
// append: one warp a (row, head). Bytes: each row's q, k, v read and written once. settle: one CTA
// a (block, head); write_through: one warp at a time a (block, head). All are small beside
// attention: a block-head completes every 16 steps.
#include "ops/cuda/check.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/types.cuh"

namespace oasis::cuda {
namespace {

constexpr int kWarpsPerCta = 8;

__device__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

template <class T, int D>
__global__ void append_kernel(Append a, int rows) {
  constexpr int kPairs = D / 64;  // of (d, d + D / 2) a thread
  const int h = a.heads.num_kv_heads, hq = h * a.heads.group, all = hq + 2 * h;
  const int unit = blockIdx.x * kWarpsPerCta + threadIdx.x / 32, lane = threadIdx.x % 32;
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

template <class T, int D>
__global__ void __launch_bounds__(D) settle_kernel(Settle s) {
  if (static_cast<int>(blockIdx.y) >= *s.num_blocks) return;
  const SettledBlock b = s.blocks[blockIdx.y];
  const int head = blockIdx.x, h = s.heads.num_kv_heads, d = threadIdx.x;
  T* page =
      static_cast<T*>(s.pool) + (static_cast<int64_t>(b.page) * h + head) * 2 * kBlockTokens * D;
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
  if (b.slots < 0) return;  // dense: the block stays where it is

  // The fill slot: the next unused one, else the least recently selected, then the lower block.
  __shared__ uint64_t best[D / 32];
  __shared__ int slot;
  const int64_t map = (static_cast<int64_t>(b.request) * h + head) * s.top_k;
  if (b.grows) {
    if (d == 0) slot = b.slots;
  } else {
    uint64_t mine = ~0ull;
    for (int i = d; i < b.slots; i += D) {
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
    for (int i = d; i < b.slots; i += D)
      if (s.slot_blocks[map + i] == static_cast<int32_t>(mine)) slot = i;
  }
  __syncthreads();
  if (d == 0) {
    s.slot_blocks[map + slot] = b.block;
    s.slot_steps[map + slot] = static_cast<int32_t>(*s.step);
    s.fill_slots[static_cast<int64_t>(blockIdx.y) * h + head] = slot;
  }
  const int64_t to_page = s.slot_pages[static_cast<int64_t>(b.request) * s.slot_stride + slot];
  const int4* from = reinterpret_cast<const int4*>(page);
  int4* to = reinterpret_cast<int4*>(static_cast<T*>(s.pool) +
                                     (to_page * h + head) * 2 * kBlockTokens * D);
  for (int i = d; i < 2 * kBlockTokens * D * static_cast<int>(sizeof(T)) / 16; i += D)
    to[i] = from[i];
}

__global__ void write_through_kernel(WriteThrough w, int head_bytes) {
  const int h = w.heads.num_kv_heads, units = *w.num_blocks * h;
  const int warps = gridDim.x * blockDim.x / 32, lane = threadIdx.x % 32;
  for (int unit = (blockIdx.x * blockDim.x + threadIdx.x) / 32; unit < units; unit += warps) {
    const SettledBlock b = w.blocks[unit / h];
    const int head = unit % h;
    const int64_t page =
        b.slots < 0
            ? b.page
            : w.slot_pages[static_cast<int64_t>(b.request) * w.slot_stride + w.fill_slots[unit]];
    const int64_t host = w.host_units[b.request * w.host_stride +
                                      static_cast<int64_t>(b.block) * w.host_step + w.host_offset];
    const int4* from = reinterpret_cast<const int4*>(static_cast<const char*>(w.pool) +
                                                     (page * h + head) * head_bytes);
    int4* to =
        reinterpret_cast<int4*>(static_cast<char*>(w.host_base) + (host * h + head) * head_bytes);
    for (int i = lane; i < head_bytes / 16; i += 32) __stcs(to + i, from[i]);
  }
}

template <class T, int D>
void launch(const Append& a, int rows, cudaStream_t stream) {
  const int units = rows * (a.heads.group + 2) * a.heads.num_kv_heads;
  append_kernel<T, D>
      <<<(units + kWarpsPerCta - 1) / kWarpsPerCta, 32 * kWarpsPerCta, 0, stream>>>(a, rows);
}
template <class T, int D>
void launch(const Settle& s, int max_blocks, cudaStream_t stream) {
  settle_kernel<T, D><<<dim3(s.heads.num_kv_heads, max_blocks), D, 0, stream>>>(s);
}

template <class Args>
void dispatch(const Args& a, int n, const char* what, cudaStream_t stream) {
  auto of = [&]<class T>(T) {
    if (a.heads.head_dim == 64)
      launch<T, 64>(a, n, stream);
    else if (a.heads.head_dim == 128)
      launch<T, 128>(a, n, stream);
    else
      refuse("head_dim", a.heads.head_dim, "64 or 128");
  };
  if (n <= 0) return;
  if (a.dtype == DType::kFloat32) of(float{});
  if (a.dtype == DType::kFloat16) of(Half{});
  if (a.dtype == DType::kBFloat16) of(BFloat16{});
  check(cudaGetLastError(), what);
}

}  // namespace

void append(const Append& a, int rows, cudaStream_t stream) { dispatch(a, rows, "append", stream); }
void settle(const Settle& s, int max_blocks, cudaStream_t stream) {
  dispatch(s, max_blocks, "settle", stream);
}

void write_through(const WriteThrough& w, int num_ctas, cudaStream_t stream) {
  const int element = w.dtype == DType::kFloat32 ? 4 : 2;
  write_through_kernel<<<num_ctas, 256, 0, stream>>>(w,
                                                     2 * kBlockTokens * w.heads.head_dim * element);
  check(cudaGetLastError(), "write_through");
}

}  // namespace oasis::cuda
