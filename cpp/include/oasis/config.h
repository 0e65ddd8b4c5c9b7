// What a core is built for. Validated once; nothing below checks it again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "oasis/types.h"

namespace oasis {

enum class SummaryKind { kMeanStd, kMinMax, kHalves };
enum class GroupCombine { kSoftmaxSum, kMax, kSum };

enum class DType { kFloat32, kFloat16, kBFloat16 };

SummaryKind summary_kind_from(const std::string& name);
GroupCombine group_combine_from(const std::string& name);
DType dtype_from(const std::string& name);
constexpr int element_bytes(DType t) { return t == DType::kFloat32 ? 4 : 2; }

// Of the GPU, in a step that may bring up to so many bytes over the link.
struct GatherShare {
  int64_t link_bytes;
  int ctas;            // single-warp CTAs that fetch, an SM each; 0: nothing is fetched (ablations)
  int in_flight;       // runs of 8 KiB that each has under way: 2, 4, 6 or 8
  int foreground_sms;  // that matrix products may use; 0: all
};

struct CoreConfig {
  std::string backend = "cpu";    // or "cuda"
  std::string dtype = "float32";  // of the KV cache, qkv and out; float32 on the CPU

  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;

  bool sparse_enabled = true;
  int top_k_blocks = 128;
  int fetch_cap_blocks = 6;
  int sink_blocks = 0;  // first blocks that every head always wants
  int64_t sparse_from_tokens = 129 * kBlockTokens;
  int max_draft_len = 1;
  bool accept_drafts = false;
  std::string summary = "mean_std";
  std::string group_combine = "softmax_sum";

  int64_t device_pages = 0;
  int64_t host_blocks = 0;
  int64_t summary_pages = 0;  // 0: as many as the host pool can ever need
  int max_batch_size = 64;
  int max_num_tokens = 512;
  int64_t max_seq_len = 0;

  // CUDA only.
  std::vector<std::pair<uintptr_t, uintptr_t>> qk_norms;  // a layer's [D] weights; empty: none
  float norm_eps = 0.0f;
  int captured_sizes = 128;  // of decode steps: the last used are CUDA graphs; 0: none is
  std::vector<GatherShare> gather_shares;  // by link_bytes, ascending; the last serves all above
  int64_t host_assume_bytes = 0;  // memory there is for the host pool; 0: as the machine says
  std::function<void(int64_t done, int64_t total)> host_progress;  // bytes that are pinned

  int num_threads = 1;
  bool trace = false;
  int transfer_delay_us = 0;  // fault injection: each transfer job sleeps a random time up to this
  uint64_t fault_seed = 0;

  int group() const { return num_q_heads / num_kv_heads; }
  // Elements of dtype.
  int64_t block_head_elements() const { return int64_t{2} * kBlockTokens * head_dim; }
  int64_t page_elements() const { return block_head_elements() * num_kv_heads; }
  int64_t summary_page_elements() const {
    return int64_t{kSummaryBlocks} * 2 * head_dim * num_kv_heads;
  }
  int64_t page_bytes() const { return page_elements() * element_bytes(dtype_from(dtype)); }
  int64_t summary_pages_needed() const;

  // Throws for shares that are none, out of range or not ascending.
  static void check_shares(const std::vector<GatherShare>& shares);
  void validate() const;  // throws std::invalid_argument naming the field, its value and what to do
};

}  // namespace oasis
