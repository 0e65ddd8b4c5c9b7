#include "backend/cuda/buffers.h"

namespace oasis::cuda {
namespace {

DeviceMemory uploaded(const float* from, int64_t count, const char* what) {
  DeviceMemory memory(4 * count, what);
  check(cudaMemcpy(memory.data(), from, 4 * count, cudaMemcpyHostToDevice), what);
  return memory;
}

DeviceMemory zeroed(int64_t bytes, const char* what) {
  DeviceMemory memory(bytes, what);
  check(cudaMemset(memory.data(), 0, bytes), what);
  return memory;
}

std::unique_ptr<HostMemory> host_memory(const CoreConfig& config) {
  if (config.host_blocks == 0) return nullptr;
  HostMemory::Options options;
  options.bytes = config.host_blocks * config.page_bytes();
  options.assume_bytes = config.host_assume_bytes;
  options.progress = config.host_progress;
  return std::make_unique<HostMemory>(options);
}

}  // namespace

Buffers::Buffers(const CoreConfig& config, const Tables& tables, const StepArrays& arrays,
                 int lane_tiles, const float* cos, const float* sin)
    : dtype(dtype_from(config.dtype)),
      element_bytes(oasis::element_bytes(dtype)),
      head_bytes(static_cast<int>(config.block_head_elements()) * element_bytes),
      pool_layer_bytes(config.device_pages * config.page_elements() * element_bytes),
      summary_layer_bytes_(config.summary_pages_needed() * config.summary_page_elements() *
                           element_bytes),
      pool_(pool_layer_bytes * config.num_layers, "device_kv_gib: device KV pool"),
      summaries_(summary_layer_bytes_ * config.num_layers, "summary pool"),
      cos_(uploaded(cos, config.max_seq_len * config.head_dim / 2, "rotary table")),
      sin_(uploaded(sin, config.max_seq_len * config.head_dim / 2, "rotary table")),
      host_(host_memory(config)) {
  const int64_t batch = config.max_batch_size, drafts = std::max(1, config.max_draft_len);
  const int64_t hq = config.num_q_heads, heads = config.num_kv_heads, layers = config.num_layers;
  const int64_t row_bytes = hq * config.head_dim * element_bytes, copy_bytes = sizeof(Copy);
  q_ = DeviceMemory(config.max_num_tokens * row_bytes, "queries");
  if (dtype != DType::kFloat32) {
    const int64_t units = arrays.max_splits() * heads * lane_tiles;
    partials_ = DeviceMemory(4 * units * attention_partial_floats(config.head_dim), "attention");
    arrivals_ = zeroed(4 * units, "attention");
  }
  staged_layer_bytes_ = batch * drafts * row_bytes;
  copies_each_ = batch * heads * config.fetch_cap_blocks;
  scores_each_ = batch * hq * drafts * div_up(tables.max_blocks, 32) * 32;
  num_copies_ = zeroed(4 * layers, "copies");
  transferred_ = zeroed(8 * layers, "flags");
  gather_arrivals_ = zeroed(4 * layers, "flags");
  const int64_t most = std::max<int64_t>(tables.max_blocks, config.top_k_blocks);
  move_pages_ = DeviceMemory(4 * most, "page list");
  if (host_) {
    moves_ = DeviceMemory(most * layers * heads * copy_bytes, "copies");
    num_moves_ = DeviceMemory(4, "copies");
  }
  if (!config.sparse_enabled) return;
  if (scores_each_ > INT32_MAX)
    throw std::invalid_argument("max_batch_size = " + std::to_string(batch) +
                                ": with this max_seq_len and draft_len the scores exceed 2^31 "
                                "entries; lower one of the three");
  moved_blocks_ = DeviceMemory(tables.max_blocks * sizeof(SettledBlock), "block list");
  staged_ = DeviceMemory(layers * staged_layer_bytes_, "staged queries");
  copies_ = DeviceMemory(layers * copies_each_ * copy_bytes, "copies");
  scores_ = DeviceMemory(2 * 4 * scores_each_, "scores");
}

}  // namespace oasis::cuda
