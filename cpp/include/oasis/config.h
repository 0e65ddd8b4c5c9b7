// What a core is built for. Validated once; nothing below checks it again.
#pragma once

#include <cstdint>
#include <string>

#include "oasis/types.h"

namespace oasis {

enum class SummaryKind { kMeanStd, kMinMax, kHalves };
enum class GroupCombine { kSoftmaxSum, kMax, kSum };

SummaryKind summary_kind_from(const std::string& name);
GroupCombine group_combine_from(const std::string& name);

struct CoreConfig {
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

  int num_threads = 1;
  bool trace = false;
  int transfer_delay_us = 0;  // fault injection: each transfer job sleeps a random time up to this
  uint64_t fault_seed = 0;

  int group() const { return num_q_heads / num_kv_heads; }
  int64_t block_head_floats() const { return int64_t{2} * kBlockTokens * head_dim; }
  int64_t page_floats() const { return block_head_floats() * num_kv_heads; }
  int64_t summary_page_floats() const {
    return int64_t{kSummaryBlocks} * 2 * head_dim * num_kv_heads;
  }

  void validate() const;  // throws std::invalid_argument naming the field, its value and what to do
};

}  // namespace oasis
