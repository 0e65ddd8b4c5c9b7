// The life of a request on CUDA: its tables, when it turns sparse, and preemption.
#include "backend/cuda/cuda_backend.h"
#include "ops/cuda/moves.h"

namespace oasis::cuda {
namespace {

constexpr int kMoveCtas = 8, kMovesInFlight = 4;

}  // namespace

void CudaBackend::admit(const SequenceKv& seq) {
  static_assert(sizeof(HostBlock) == 4 && sizeof(SummaryPage) == 4);
  use_device();
  join();
  ring_.upload(tables_.host_units(seq.row()), seq.host_units().data(), 4 * seq.host_units().size());
  ring_.upload(tables_.summary_pages(seq.row()), seq.summary_pages().data(),
               4 * seq.summary_pages().size());
  check(cudaMemsetAsync(tables_.stats() + seq.row().value * Tables::kStats, 0,
                        Tables::kStats * sizeof(int64_t), foreground_),
        "admit");
  if (seq.settled > 0) bring_reused_blocks(seq);
}

// What was kept last may have been written by the step that is under way: after join().
void CudaBackend::bring_reused_blocks(const SequenceKv& seq) {
  const auto count = static_cast<int>(seq.settled);
  move_blocks(seq, true, count, reinterpret_cast<const int32_t*>(seq.pages().data()), nullptr, 0);
  if (!config_.sparse_enabled) return;
  std::vector<SettledBlock> blocks;
  for (int b = 0; b < count; ++b)
    blocks.push_back({seq.row().value, b, seq.pages()[b].value, -1, 0});
  ring_.upload(buffers_.moved_blocks(), blocks.data(), count * int64_t{sizeof(SettledBlock)});
  ring_.upload(buffers_.num_moves(), &count, 4);
  for (int l = 0; l < config_.num_layers; ++l)
    kernels_.summarize(l, buffers_.moved_blocks(), buffers_.num_moves(), count, foreground_);
}

void CudaBackend::sparsify(const SequenceKv& seq, int64_t complete, int64_t step) {
  use_device();
  join();
  const int64_t slots = seq.first_slots(complete), map = tables_.map_of(seq.row());
  ring_.upload(buffers_.move_pages(), seq.pages().data(), 4 * complete);
  ring_.upload(tables_.slot_pages(seq.row()), seq.pages().data(), 4 * slots);
  cuda::sparsify({.heads = heads(),
                  .layers = config_.num_layers,
                  .element_bytes = buffers_.element_bytes,
                  .slots = static_cast<int>(slots),
                  .step = step,
                  .pages = buffers_.move_pages(),
                  .first_choice = tables_.first_choice(0) + map,
                  .slot_blocks = tables_.slot_blocks(0) + map,
                  .slot_steps = tables_.slot_steps(0) + map,
                  .map_stride = tables_.layer_maps(),
                  .top_k = config_.top_k_blocks,
                  .pool = buffers_.pool(0),
                  .layer_bytes = buffers_.pool_layer_bytes},
                 foreground_);
}

// `count` blocks of the sequence between their host units and `pages` (on the host), in all layers
// and heads: those in the slots, or first_block and those after it where `blocks` is null.
void CudaBackend::move_blocks(const SequenceKv& seq, bool to_device, int count,
                              const int32_t* pages, const int32_t* blocks, int64_t first_block) {
  if (count == 0) return;
  const int64_t heads_in_all = int64_t{config_.num_layers} * config_.num_kv_heads;
  const auto total = static_cast<int32_t>(count * heads_in_all);
  ring_.upload(buffers_.move_pages(), pages, 4 * count);
  ring_.upload(buffers_.num_moves(), &total, 4);
  list_copies({.heads = heads(),
               .layers = config_.num_layers,
               .element_bytes = buffers_.element_bytes,
               .count = count,
               .pages = buffers_.move_pages(),
               .blocks = blocks,
               .first_block = static_cast<int>(first_block),
               .map_stride = tables_.layer_maps(),
               .top_k = config_.top_k_blocks,
               .host_units = tables_.host_units(seq.row()),
               .host_base = buffers_.host(),
               .pool = buffers_.pool(0),
               .layer_bytes = buffers_.pool_layer_bytes,
               .to_device = to_device,
               .copies = buffers_.moves()},
              foreground_);
  gather(buffers_.moves(), buffers_.num_moves(), buffers_.head_bytes, kMoveCtas, kMovesInFlight, {},
         foreground_);
}

void CudaBackend::move_open_blocks(const SequenceKv& seq, bool to_device) {
  std::vector<int32_t> pages;
  for (int64_t b = seq.settled; b < seq.open_blocks_end(); ++b)
    pages.push_back(seq.page_of_open_block(LogicalBlock(b)).value);
  move_blocks(seq, to_device, static_cast<int>(pages.size()), pages.data(), nullptr, seq.settled);
}

void CudaBackend::save(const SequenceKv& seq) {
  use_device();
  join();
  move_open_blocks(seq, false);
}

void CudaBackend::restore(const SequenceKv& seq) {
  use_device();
  join();
  move_open_blocks(seq, true);
  const auto* pages = reinterpret_cast<const int32_t*>(seq.pages().data());
  if (!seq.in_sparse()) {
    move_blocks(seq, true, static_cast<int>(seq.settled), pages, nullptr, 0);
    return;
  }
  const auto slots = static_cast<int>(seq.pages().size());
  ring_.upload(tables_.slot_pages(seq.row()), pages, 4 * slots);
  move_blocks(seq, true, slots, pages, tables_.slot_blocks(0) + tables_.map_of(seq.row()), 0);
}

}  // namespace oasis::cuda
