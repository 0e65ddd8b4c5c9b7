#include "backend/cuda/layer_kernels.h"

#include "ops/cuda/prefill.h"

namespace oasis::cuda {
namespace {

constexpr int kWriteCtas = 8;

}  // namespace

void LayerKernels::set_step(int parity, const StepSizes& sizes, const Cutting& cut) {
  parity_ = parity;
  sizes_ = sizes;
  cut_ = cut;
}

void LayerKernels::hold(int layer, cudaStream_t stream) const {
  if (layer % kHeldLayers != 0) return;
  wait_flags(buffers_.transferred(layer), std::min(kHeldLayers, config_.num_layers - layer),
             arrays_.step(parity_), 0,
             {arrays_.predictors(parity_), arrays_.num_predictors(parity_), tables_.stats()},
             stream);
}

Settle LayerKernels::settle(int layer, const SettledBlock* blocks,
                            const int32_t* num_blocks) const {
  return {.kind = summary_kind_from(config_.summary),
          .top_k = config_.top_k_blocks,
          .blocks = blocks,
          .num_blocks = num_blocks,
          .summaries = buffers_.summaries(layer),
          .summary_pages = tables_.summary_pages(),
          .summary_stride = static_cast<int>(tables_.summary_stride),
          .slot_blocks = tables_.slot_blocks(layer),
          .slot_steps = tables_.slot_steps(layer),
          .slot_pages = tables_.slot_pages(),
          .slot_stride = config_.top_k_blocks,
          .step = arrays_.step(parity_)};
}

void LayerKernels::summarize(int layer, const SettledBlock* blocks, const int32_t* num_blocks,
                             int count, cudaStream_t stream) const {
  Append no_rows = {};
  no_rows.dtype = buffers_.dtype;
  no_rows.heads = heads();
  no_rows.pool = buffers_.pool(layer);
  cuda::append(no_rows, 0, settle(layer, blocks, num_blocks), count, stream);
}

void LayerKernels::append(int layer, const void* qkv, cudaStream_t stream) const {
  const auto& norms = config_.qk_norms;
  cuda::append(
      {.dtype = buffers_.dtype,
       .heads = heads(),
       .qkv = qkv,
       .rows = arrays_.rows(parity_),
       .cos = buffers_.cos(),
       .sin = buffers_.sin(),
       .q_norm = norms.empty() ? nullptr : reinterpret_cast<const void*>(norms[layer].first),
       .k_norm = norms.empty() ? nullptr : reinterpret_cast<const void*>(norms[layer].second),
       .norm_eps = config_.norm_eps,
       .q = buffers_.q(),
       .staged = buffers_.staged(layer),
       .pool = buffers_.pool(layer),
       .num_copies = buffers_.num_copies(layer)},
      sizes_.rows, settle(layer, arrays_.settled(parity_), arrays_.num_settled(parity_)),
      config_.sparse_enabled ? sizes_.settled : 0, stream);
}

void LayerKernels::attend(int layer, void* out, cudaStream_t stream) const {
  const StepArrays::Counts& n = arrays_.counts();
  if (n.splits > 0)  // so in every captured step
    attention({.dtype = buffers_.dtype,
               .heads = heads(),
               .q = buffers_.q(),
               .pool = buffers_.pool(layer),
               .out = out,
               .segments = arrays_.segments(parity_),
               .pages = arrays_.pages(parity_),
               .splits = arrays_.splits(parity_),
               .num_splits = arrays_.num_splits(parity_),
               .max_lane_tiles = cut_.lane_tiles,
               .partials = buffers_.partials(),
               .arrivals = buffers_.arrivals(),
               .num_ctas = cut_.attention_ctas},
              stream);
  if (n.prefill_tiles > 0)
    prefill({.dtype = buffers_.dtype,
             .heads = heads(),
             .q = buffers_.q(),
             .pool = buffers_.pool(layer),
             .out = out,
             .segments = arrays_.segments(parity_),
             .pages = arrays_.pages(parity_),
             .tiles = arrays_.prefill_tiles(parity_),
             .num_tiles = n.prefill_tiles,
             .num_pages = config_.device_pages},
            stream);
}

void LayerKernels::score(int layer, cudaStream_t stream) const {
  if (sizes_.predictors == 0) return;
  cuda::score({.dtype = buffers_.dtype,
               .heads = heads(),
               .kind = summary_kind_from(config_.summary),
               .staged = buffers_.staged(layer),
               .summaries = buffers_.summaries(layer),
               .predictors = arrays_.predictors(parity_),
               .summary_pages = tables_.summary_pages(),
               .summary_stride = static_cast<int>(tables_.summary_stride),
               .splits = arrays_.score_splits(parity_),
               .num_splits = arrays_.num_score_splits(parity_),
               .max_lane_tiles = static_cast<int>(div_up(max_lanes(), kLaneTile)),
               .scores = buffers_.scores(parity_),
               .num_ctas = cut_.score_ctas},
              stream);
}

void LayerKernels::select(int layer, cudaStream_t stream) const {
  if (sizes_.predictors == 0) return;
  cuda::select({.heads = heads(),
                .combine = group_combine_from(config_.group_combine),
                .top_k = config_.top_k_blocks,
                .fetch_cap = config_.fetch_cap_blocks,
                .sink_blocks = config_.sink_blocks,
                .element_bytes = buffers_.element_bytes,
                .scores = buffers_.scores(parity_),
                .predictors = arrays_.predictors(parity_),
                .num_predictors = arrays_.num_predictors(parity_),
                .max_predictors = sizes_.predictors,
                .max_blocks = sizes_.score_blocks,
                .max_lanes = max_lanes(),
                .step = arrays_.step(parity_),
                .slot_blocks = tables_.slot_blocks(layer),
                .slot_steps = tables_.slot_steps(layer),
                .first_choice = tables_.first_choice(layer),
                .slot_pages = tables_.slot_pages(),
                .slot_stride = config_.top_k_blocks,
                .host_units = tables_.host_units(),
                .host_stride = tables_.host_stride(),
                .host_step = config_.num_layers,
                .host_offset = layer,
                .host_base = buffers_.host(),
                .pool = buffers_.pool(layer),
                .copies = buffers_.copies(layer),
                .num_copies = buffers_.num_copies(layer),
                .stats = tables_.stats()},
               stream);
}

void LayerKernels::write_through(int layer, cudaStream_t stream) const {
  if (sizes_.settled == 0 || layer % kWriteLayers != 0) return;
  cuda::write_through({.heads = heads(),
                       .element_bytes = buffers_.element_bytes,
                       .layers = std::min(kWriteLayers, config_.num_layers - layer),
                       .blocks = arrays_.settled(parity_),
                       .num_blocks = arrays_.num_settled(parity_),
                       .pool = buffers_.pool(layer),
                       .layer_bytes = buffers_.pool_layer_bytes,
                       .host_units = tables_.host_units(),
                       .host_stride = tables_.host_stride(),
                       .host_step = config_.num_layers,
                       .host_offset = layer,
                       .host_base = buffers_.host()},
                      kWriteCtas, stream);
}

void LayerKernels::gather(int layer, cudaStream_t stream) const {
  const DoneFlag done = {buffers_.transferred(layer), buffers_.gather_arrivals(layer),
                         arrays_.step(parity_)};
  if (sizes_.share.ctas == 0) return set_flags(done.flag, 1, done.step, 0, stream);
  cuda::gather(buffers_.copies(layer), buffers_.num_copies(layer), buffers_.head_bytes,
               sizes_.share.ctas / kGathers, sizes_.share.in_flight, done, stream);
}

}  // namespace oasis::cuda
