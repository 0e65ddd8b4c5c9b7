#include "oasis/config.h"

namespace oasis {
namespace {

void need(bool ok, const std::string& field, int64_t value, const std::string& rule) {
  if (!ok) throw std::invalid_argument(field + " = " + std::to_string(value) + ": " + rule);
}

}  // namespace

SummaryKind summary_kind_from(const std::string& name) {
  if (name == "mean_std") return SummaryKind::kMeanStd;
  if (name == "minmax") return SummaryKind::kMinMax;
  if (name == "halves") return SummaryKind::kHalves;
  throw std::invalid_argument("summary = '" + name + "': use mean_std, minmax or halves");
}

GroupCombine group_combine_from(const std::string& name) {
  if (name == "softmax_sum") return GroupCombine::kSoftmaxSum;
  if (name == "max") return GroupCombine::kMax;
  if (name == "sum") return GroupCombine::kSum;
  throw std::invalid_argument("group_combine = '" + name + "': use softmax_sum, max or sum");
}

DType dtype_from(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  throw std::invalid_argument("dtype = '" + name + "': use float32, float16 or bfloat16");
}

int64_t CoreConfig::summary_pages_needed() const {
  if (!sparse_enabled) return 0;
  if (summary_pages > 0) return summary_pages;
  return div_up(host_blocks / num_layers, kSummaryBlocks) + max_batch_size;
}

void CoreConfig::check_shares(const std::vector<GatherShare>& shares) {
  need(!shares.empty(), "gather_shares", 0, "there must be one at least: how many SMs fetch");
  for (size_t i = 0; i < shares.size(); ++i) {
    need(shares[i].ctas >= 0 && shares[i].ctas <= 64, "gather_shares", shares[i].ctas,
         "must be in 0..64 CTAs");
    const int runs = shares[i].in_flight;
    need(runs == 2 || runs == 4 || runs == 6 || runs == 8, "gather_shares", runs,
         "in_flight must be 2, 4, 6 or 8 runs");
    need(i == 0 || shares[i].link_bytes > shares[i - 1].link_bytes, "gather_shares",
         shares[i].link_bytes, "link_bytes must ascend");
  }
}

void CoreConfig::validate() const {
  need(num_layers > 0, "num_layers", num_layers, "must be at least 1");
  need(num_kv_heads > 0, "num_kv_heads", num_kv_heads, "must be at least 1");
  need(num_q_heads > 0 && num_q_heads % num_kv_heads == 0, "num_q_heads", num_q_heads,
       "must be a multiple of num_kv_heads");
  need(group() <= 16, "num_q_heads", num_q_heads,
       "at most 16 query heads per KV head are supported");
  need(head_dim > 0 && head_dim % 16 == 0 && head_dim <= 256, "head_dim", head_dim,
       "must be a multiple of 16 up to 256");
  need(top_k_blocks > 0, "top_k_blocks", top_k_blocks, "must be at least 1");
  need(fetch_cap_blocks > 0 && fetch_cap_blocks <= top_k_blocks, "fetch_cap_blocks",
       fetch_cap_blocks, "must be in 1..top_k_blocks");
  need(sink_blocks >= 0 && sink_blocks <= top_k_blocks, "sink_blocks", sink_blocks,
       "must be in 0..top_k_blocks");
  need(sparse_from_tokens >= kBlockTokens, "sparse_from_tokens", sparse_from_tokens,
       "must be at least one block (16)");
  need(max_draft_len >= 0 && max_draft_len <= kMaxDraftLen, "max_draft_len", max_draft_len,
       "must be in 0..15");
  need(device_pages > 0 && device_pages <= INT32_MAX, "device_pages", device_pages,
       "must be in 1..2^31-1: change device_kv_gib");
  const bool host_needed = backend == "cpu" || sparse_enabled;
  need(
      (host_blocks >= num_layers || (host_blocks == 0 && !host_needed)) && host_blocks <= INT32_MAX,
      "host_blocks", host_blocks,
      "must hold one block of every layer, and be below 2^31: change host_kv_gib; none at all is "
      "for dense on CUDA");
  need(summary_pages >= 0, "summary_pages", summary_pages, "must be 0 (automatic) or more");
  need(max_batch_size > 0, "max_batch_size", max_batch_size, "must be at least 1");
  need(captured_sizes >= 0, "captured_sizes", captured_sizes, "must not be negative");
  need(max_num_tokens >= max_batch_size * (1 + max_draft_len), "max_num_tokens", max_num_tokens,
       "must hold max_batch_size * (1 + max_draft_len) decode rows");
  need(max_seq_len > 0, "max_seq_len", max_seq_len, "must be at least 1");
  need(num_threads > 0, "num_threads", num_threads, "must be at least 1");
  need(transfer_delay_us >= 0, "transfer_delay_us", transfer_delay_us, "must not be negative");
  if (backend != "cpu" && backend != "cuda")
    throw std::invalid_argument("backend = '" + backend + "': use cpu or cuda");
  if (dtype_from(dtype) != DType::kFloat32 && backend == "cpu")
    throw std::invalid_argument("dtype = '" + dtype + "': the CPU backend computes in float32");
  need(backend == "cpu" || head_dim == 64 || head_dim == 128, "head_dim", head_dim,
       "must be 64 or 128 on CUDA");
  need(qk_norms.empty() || static_cast<int>(qk_norms.size()) == num_layers, "qk_norms",
       static_cast<int64_t>(qk_norms.size()), "must be one pair a layer");
  if (backend == "cuda" && sparse_enabled) check_shares(gather_shares);
  summary_kind_from(summary);
  group_combine_from(group_combine);
}

}  // namespace oasis
