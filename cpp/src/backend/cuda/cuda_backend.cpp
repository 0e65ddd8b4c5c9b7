#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "ops/cuda/moves.h"
#include "ops/cuda/prefill.h"

namespace oasis::cuda {
namespace {

constexpr int kMoveCtas = 8, kWriteCtas = 4;

int current_device() {
  int device;
  check(cudaGetDevice(&device), "no CUDA device");
  return device;
}

int multiprocessors() {
  int count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()), "device");
  return count;
}

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

}  // namespace

CudaBackend::CudaBackend(const CoreConfig& config, const float* cos, const float* sin)
    : config_(config),
      dtype_(dtype_from(config.dtype)),
      element_bytes_(element_bytes(dtype_)),
      head_bytes_(static_cast<int>(config.block_head_elements()) * element_bytes_),
      sms_(multiprocessors()),
      device_(current_device()),
      pool_layer_bytes_(config.device_pages * config.page_elements() * element_bytes_),
      summary_layer_bytes_(config.summary_pages_needed() * config.summary_page_elements() *
                           element_bytes_),
      events_(2 * config.num_layers),
      pool_(pool_layer_bytes_ * config.num_layers, "device_kv_gib: device KV pool"),
      summaries_(summary_layer_bytes_ * config.num_layers, "summary pool"),
      cos_(uploaded(cos, config.max_seq_len * config.head_dim / 2, "rotary table")),
      sin_(uploaded(sin, config.max_seq_len * config.head_dim / 2, "rotary table")),
      tables_(config),
      arrays_(config),
      ring_(std::max(arrays_.max_bytes(), 4 * tables_.host_stride()), foreground_),
      stats_(2 * 8ll * Tables::kStats * config.max_batch_size, "statistics") {
  const int64_t batch = config_.max_batch_size, drafts = std::max(1, config_.max_draft_len);
  const int64_t hq = config_.num_q_heads, layers = config_.num_layers;
  if (config_.host_blocks > 0) {
    HostMemory::Options options;
    options.bytes = config_.host_blocks * config_.page_bytes();
    options.assume_bytes = config_.host_assume_bytes;
    options.progress = config_.host_progress;
    host_ = std::make_unique<HostMemory>(options);
  }
  q_ = DeviceMemory(config_.max_num_tokens * hq * config_.head_dim * element_bytes_, "queries");
  check_limits();
  gather_shares_ = config_.gather_shares;
  cut_.lane_tiles =
      static_cast<int>(div_up((1 + config_.max_draft_len) * config_.group(), kLaneTile));
  if (dtype_ != DType::kFloat32) {
    const int64_t units = arrays_.max_splits() * config_.num_kv_heads * cut_.lane_tiles;
    partials_ = DeviceMemory(4 * units * attention_partial_floats(config_.head_dim), "attention");
    arrivals_ = zeroed(4 * units, "attention");
  }
  num_copies_ = zeroed(4 * layers, "copies");
  move_pages_ =
      DeviceMemory(4 * std::max<int64_t>(tables_.max_blocks, config_.top_k_blocks), "page list");
  if (background()) {  // of a whole request, when it is preempted or resumes
    const int64_t most = std::max<int64_t>(tables_.max_blocks, config_.top_k_blocks);
    moves_ = DeviceMemory(most * layers * config_.num_kv_heads * static_cast<int64_t>(sizeof(Copy)),
                          "copies");
    num_moves_ = DeviceMemory(4, "copies");
  }
  std::memset(stats_.data(), 0, 2 * 8 * Tables::kStats * batch);
  if (config_.sparse_enabled) {
    const int64_t row_bytes = hq * config_.head_dim * element_bytes_;
    staged_ = DeviceMemory(layers * batch * drafts * row_bytes, "staged queries");
    scores_each_ = batch * hq * drafts * div_up(tables_.max_blocks, 32) * 32;
    if (scores_each_ > INT32_MAX)
      throw std::invalid_argument("max_batch_size = " + std::to_string(batch) +
                                  ": with this max_seq_len and draft_len the scores exceed 2^31 "
                                  "entries; lower one of the three");
    scores_ = DeviceMemory(2 * 4 * scores_each_, "scores");
    copies_ = DeviceMemory(layers * batch * config_.num_kv_heads * config_.fetch_cap_blocks *
                               static_cast<int64_t>(sizeof(Copy)),
                           "copies");
    fill_slots_ =
        DeviceMemory(4 * layers * arrays_.max_settled() * config_.num_kv_heads, "fill slots");
  }
}

// What the kernels cannot serve is refused before anything runs.
void CudaBackend::check_limits() {
  if (config_.max_num_tokens > 65535)
    refuse("max_num_tokens", config_.max_num_tokens, "at most 65535 on CUDA");
  if (!config_.sparse_enabled) return;
  const int lanes = std::max(1, config_.max_draft_len) * config_.group();
  max_select_blocks_ = select_max_blocks(config_.top_k_blocks, lanes);
  const std::string most = "at most " + std::to_string(max_select_blocks_ * kBlockTokens) +
                           " on CUDA with this top_k_blocks and draft_len";
  if (tables_.max_blocks > max_select_blocks_)
    refuse("max_seq_len", config_.max_seq_len, most.c_str());
  if (std::min<int64_t>(config_.top_k_blocks, tables_.max_blocks) > kMostSlots)
    refuse("top_k_blocks", config_.top_k_blocks, "at most 12288 on CUDA");
}

// The thread that drives a core need not be the one that made it.
void CudaBackend::use_device() { check(cudaSetDevice(device_), "device"); }

void CudaBackend::share_sms(std::vector<GatherShare> shares) {
  drain();
  graphs_.clear();
  gather_shares_ = std::move(shares);
}

// The more of the link a step needs, the more SMs its gather gets: under load one alone moves less.
int CudaBackend::gather_ctas(int64_t requests) const {
  const int64_t bytes =
      requests * config_.num_layers * config_.num_kv_heads * config_.fetch_cap_blocks * head_bytes_;
  for (const GatherShare& s : gather_shares_)
    if (bytes <= s.link_bytes) return s.ctas;
  return gather_shares_.back().ctas;
}

CudaBackend::~CudaBackend() { cudaDeviceSynchronize(); }

// The foreground goes on after all that is under way.
void CudaBackend::join() {
  if (last_step_ > 0 && background())
    events(config_.num_layers - 1, last_step_).transferred.hold(foreground_);
}

// ------------------------------------------------------------ a request's life

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
}

void CudaBackend::sparsify(const SequenceKv& seq, int64_t complete, int64_t step) {
  use_device();
  join();
  const int64_t slots = seq.first_slots(complete), map = tables_.map_of(seq.row());
  ring_.upload(move_pages_.data(), seq.pages().data(), 4 * complete);
  ring_.upload(tables_.slot_pages(seq.row()), seq.pages().data(), 4 * slots);
  cuda::sparsify({.heads = heads(),
                  .layers = config_.num_layers,
                  .element_bytes = element_bytes_,
                  .slots = static_cast<int>(slots),
                  .step = step,
                  .pages = move_pages_.as<int32_t>(),
                  .first_choice = tables_.first_choice(0) + map,
                  .slot_blocks = tables_.slot_blocks(0) + map,
                  .slot_steps = tables_.slot_steps(0) + map,
                  .map_stride = tables_.layer_maps(),
                  .top_k = config_.top_k_blocks,
                  .pool = pool_.data(),
                  .layer_bytes = pool_layer_bytes_},
                 foreground_);
}

// `count` blocks of the sequence between their host units and `pages` (on the host), in all layers
// and heads: those in the slots, or first_block and those after it where `blocks` is null.
void CudaBackend::move_blocks(const SequenceKv& seq, bool to_device, int count,
                              const int32_t* pages, const int32_t* blocks, int64_t first_block) {
  if (count == 0) return;
  const int64_t heads_in_all = int64_t{config_.num_layers} * config_.num_kv_heads;
  const auto total = static_cast<int32_t>(count * heads_in_all);
  ring_.upload(move_pages_.data(), pages, 4 * count);
  ring_.upload(num_moves_.data(), &total, 4);
  list_copies({.heads = heads(),
               .layers = config_.num_layers,
               .element_bytes = element_bytes_,
               .count = count,
               .pages = move_pages_.as<int32_t>(),
               .blocks = blocks,
               .first_block = static_cast<int>(first_block),
               .map_stride = tables_.layer_maps(),
               .top_k = config_.top_k_blocks,
               .host_units = tables_.host_units(seq.row()),
               .host_base = host_->data(),
               .pool = pool_.data(),
               .layer_bytes = pool_layer_bytes_,
               .to_device = to_device,
               .copies = moves_.as<Copy>()},
              foreground_);
  gather(moves_.as<Copy>(), num_moves_.as<int32_t>(), head_bytes_, kMoveCtas, foreground_);
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

LookaheadStats CudaBackend::stats(const SequenceKv& seq, int64_t step) {
  if (step == 0) return {};
  counted_[parity_of(step)].synchronize();
  const auto* n =
      reinterpret_cast<const int64_t*>(stats_.data()) +
      (int64_t{parity_of(step)} * config_.max_batch_size + seq.row().value) * Tables::kStats;
  return {n[0], n[1], n[2], n[1] * head_bytes_, 0.0};
}

void CudaBackend::drain() {
  use_device();
  foreground_.synchronize();
  predict_.synchronize();
  transfer_.synchronize();
  for (const Stream& s : graph_streams_) s.synchronize();
}

// These two are not in the header: the runtime is linked into this library alone, and whoever
// includes it would take another, or find none.
void CudaBackend::mark_foreground() { foreground_done_[parity_of(last_step_)].record(foreground_); }

void CudaBackend::wait_foreground(int64_t step) const {
  foreground_done_[parity_of(step)].synchronize();
}

// What the step that has just ended decided, read back from the maps.
void CudaBackend::trace_step() {
  drain();
  std::vector<int32_t> blocks(config_.top_k_blocks), steps(config_.top_k_blocks);
  auto read = [&](std::vector<int32_t>& to, const int32_t* from) {
    check(cudaMemcpy(to.data(), from, 4 * to.size(), cudaMemcpyDeviceToHost), "trace");
  };
  for (const RowGroup& g : plan_->groups)
    for (int l = 0; g.predicts && l < config_.num_layers; ++l)
      for (int h = 0; h < config_.num_kv_heads; ++h) {
        const int64_t at = tables_.map_of(g.seq->row()) + int64_t{h} * config_.top_k_blocks;
        TraceRecord& record = trace_.emplace_back();
        record.step = plan_->step;
        record.id = g.id;
        record.layer = l;
        record.head = h;
        record.first = g.kind == RowKind::kDense;
        if (record.first) {
          read(blocks, tables_.first_choice(l) + at);
          for (int64_t i = 0; i < g.seq->first_slots(g.settle_to); ++i)
            record.selection.predicted.emplace_back(blocks[i]);
          continue;
        }
        read(blocks, tables_.slot_blocks(l) + at);
        read(steps, tables_.slot_steps(l) + at);
        for (size_t s = 0; s < g.seq->pages().size(); ++s) {
          record.map.emplace_back(blocks[s]);
          record.last_selected.push_back(steps[s]);
        }
      }
}

// ------------------------------------------------------------ a step

void CudaBackend::begin(std::shared_ptr<const StepPlan> plan) {
  use_device();
  plan_ = std::move(plan);
  parity_ = parity_of(plan_->step);
  next_layer_ = 0;
  for (const RowGroup& g : plan_->groups)
    if (g.grows) {  // its new slot, in time for the block that settles into it
      const size_t slot = g.seq->pages().size() - 1;
      ring_.upload(tables_.slot_pages(g.seq->row()) + slot, &g.seq->pages()[slot], 4);
    }
  plan_sizes();
  arrays_.send(*plan_, cut_, ring_);
}

// Decode steps run at one of few sizes: eagerly at first, then captured.
void CudaBackend::plan_sizes() {
  sizes_ = {};
  sizes_.rows = static_cast<int>(plan_->rows);
  bool decode = config_.graphs && !config_.trace;
  int tiles = 1;
  for (const RowGroup& g : plan_->groups) {
    sizes_.logits_rows += g.logits_rows;
    sizes_.settled += static_cast<int>(g.settle_to - g.settle_from);
    sizes_.drafted += g.drafts > 0;
    decode = decode && g.kind != RowKind::kPrefill && g.settle_to - g.settle_from <= 1;
    if (g.kind != RowKind::kPrefill || dtype_ == DType::kFloat32)
      tiles = std::max(tiles, static_cast<int>(div_up(g.rows * config_.group(), kLaneTile)));
    if (!g.predicts) continue;
    ++sizes_.predictors;
    sizes_.score_blocks = std::max(sizes_.score_blocks, static_cast<int>(g.settle_to));
    sizes_.staged_rows = std::max(sizes_.staged_rows, g.staged_rows);
  }
  graph_ = nullptr;
  size_.reset();
  if (decode) {
    const StepSize size{
        std::min<int>(row_bucket(sizes_.rows), config_.max_num_tokens),
        std::min<int>(row_bucket(sizes_.logits_rows), static_cast<int>(arrays_.max_logits_rows())),
        config_.sparse_enabled ? std::min(block_bucket(sizes_.score_blocks), max_select_blocks_)
                               : 0};
    size_ = size;
    const int requests = std::min(size.rows, config_.max_batch_size);
    sizes_.rows = size.rows;
    sizes_.logits_rows = size.logits_rows;
    sizes_.settled = sizes_.drafted = requests;
    sizes_.predictors = sizes_.predictors > 0 ? requests : 0;
    sizes_.score_blocks = size.score_blocks;
    sizes_.staged_rows = std::max(1, config_.max_draft_len);
    tiles = static_cast<int>(div_up((1 + config_.max_draft_len) * config_.group(), kLaneTile));
  }
  sizes_.gather_ctas = sizes_.predictors > 0 ? gather_ctas(sizes_.logits_rows) : 0;
  // Where the gather's CTAs are, others have no room: theirs would run after all the rest.
  cut_.attention_ctas = (sms_ - sizes_.gather_ctas) * attention_ctas_per_sm();
  cut_.score_ctas = (sms_ - sizes_.gather_ctas) * score_ctas_per_sm();
  cut_.lane_tiles = tiles;
  cut_.padded_rows = sizes_.rows;
  cut_.padded_logits = sizes_.logits_rows;
}

CudaBackend::StepView CudaBackend::view(int variant) {
  if (size_) {
    size_->variant = variant;
    graph_ = &graphs_[*size_];
  }
  const bool warmed = graph_ && graph_->warmed, captured = warmed && graph_->step[parity_];
  return {sizes_.rows,
          sizes_.logits_rows,
          sizes_.drafted,
          captured,
          warmed && !captured && !graph_->refused,
          size_.has_value(),
          sizes_.gather_ctas,
          arrays_.rows(parity_),
          arrays_.logits_rows(parity_),
          arrays_.drafted_requests(parity_)};
}

void CudaBackend::trim(const int32_t* draft_counts, int32_t* used) {
  cuda::trim({.drafted = arrays_.drafted(parity_),
              .num_drafted = arrays_.num_drafted(parity_),
              .draft_counts = draft_counts,
              .used = used,
              .rows = arrays_.rows(parity_),
              .segments = arrays_.segments(parity_),
              .predictors = arrays_.predictors(parity_)},
             sizes_.drafted, foreground_);
}

void CudaBackend::forward(int layer, const void* qkv, void* out) {
  if (background()) events(layer, plan_->step - 1).transferred.hold(foreground_, capturing_);
  settle(layer);
  append(layer, qkv);
  if (background()) {
    events(layer, plan_->step).staged.record(foreground_);
    predict(layer);
  }
  attend(layer, out);
  if (background()) {
    events(layer, plan_->step).attended.record(foreground_);
    transfer(layer);
  }
  if (++next_layer_ < config_.num_layers) return;
  if (background()) count_selections();
  if (capturing_) return;
  if (graph_) graph_->warmed = true;
  end_layers();
}

void CudaBackend::end_layers() {
  last_step_ = plan_->step;
  if (config_.trace) trace_step();
  plan_.reset();
}

// ------------------------------------------------------------ captured steps

void CudaBackend::begin_capture() {
  Graph::begin_capture(foreground_);
  capturing_ = true;
}

bool CudaBackend::end_capture() {
  foreground_done_[parity_].record(foreground_, true);
  if (background()) {
    counted_in_.record(predict_);
    counted_in_.hold(foreground_);
    moved_.record(transfer_);
    moved_.hold(foreground_);
  }
  capturing_ = false;
  next_layer_ = 0;
  graph_->refused = !graph_->step[parity_].end_capture(foreground_);
  return !graph_->refused;
}

void CudaBackend::launch() {
  const Stream& stream = graph_streams_[parity_];
  ready_.record(foreground_);
  ready_.hold(stream);
  graph_->step[parity_].launch(stream);
  foreground_done_[parity_].hold(foreground_);
  next_layer_ = config_.num_layers;
  end_layers();
}

// ------------------------------------------------------------ a layer

void CudaBackend::settle(int layer) {
  if (!config_.sparse_enabled) return;
  cuda::settle({.dtype = dtype_,
                .heads = heads(),
                .kind = summary_kind_from(config_.summary),
                .top_k = config_.top_k_blocks,
                .blocks = arrays_.settled(parity_),
                .num_blocks = arrays_.num_settled(parity_),
                .pool = pool(layer),
                .summaries = summaries(layer),
                .summary_pages = tables_.summary_pages(),
                .summary_stride = static_cast<int>(tables_.summary_stride),
                .slot_blocks = tables_.slot_blocks(layer),
                .slot_steps = tables_.slot_steps(layer),
                .slot_pages = tables_.slot_pages(),
                .slot_stride = config_.top_k_blocks,
                .step = arrays_.step(parity_),
                .fill_slots = fill_slots(layer)},
               sizes_.settled, foreground_);
}

void CudaBackend::append(int layer, const void* qkv) {
  const auto& norms = config_.qk_norms;
  cuda::append(
      {.dtype = dtype_,
       .heads = heads(),
       .qkv = qkv,
       .rows = arrays_.rows(parity_),
       .cos = cos_.as<float>(),
       .sin = sin_.as<float>(),
       .q_norm = norms.empty() ? nullptr : reinterpret_cast<const void*>(norms[layer].first),
       .k_norm = norms.empty() ? nullptr : reinterpret_cast<const void*>(norms[layer].second),
       .norm_eps = config_.norm_eps,
       .q = q_.data(),
       .staged = staged(layer),
       .pool = pool(layer),
       .num_copies = num_copies_.as<int32_t>() + layer},
      sizes_.rows, foreground_);
}

void CudaBackend::attend(int layer, void* out) {
  const StepArrays::Counts& n = arrays_.counts();
  if (!out) return;
  if (n.splits > 0)  // so in every captured step
    attention({.dtype = dtype_,
               .heads = heads(),
               .q = q_.data(),
               .pool = pool(layer),
               .out = out,
               .segments = arrays_.segments(parity_),
               .pages = arrays_.pages(parity_),
               .splits = arrays_.splits(parity_),
               .num_splits = arrays_.num_splits(parity_),
               .max_lane_tiles = cut_.lane_tiles,
               .partials = partials_.as<float>(),
               .arrivals = arrivals_.as<int32_t>(),
               .num_ctas = cut_.attention_ctas},
              foreground_);
  if (n.prefill_tiles > 0)
    prefill({.dtype = dtype_,
             .heads = heads(),
             .q = q_.data(),
             .pool = pool(layer),
             .out = out,
             .segments = arrays_.segments(parity_),
             .pages = arrays_.pages(parity_),
             .tiles = arrays_.prefill_tiles(parity_),
             .num_tiles = n.prefill_tiles,
             .num_pages = config_.device_pages},
            foreground_);
}

void CudaBackend::predict(int layer) {
  const LayerEvents& now = events(layer, plan_->step);
  now.staged.hold(predict_);
  if (layer == 0) counted_[parity_ ^ 1].hold(predict_, capturing_);
  if (sizes_.predictors > 0) {
    const int lanes = sizes_.staged_rows * config_.group();
    score({.dtype = dtype_,
           .heads = heads(),
           .kind = summary_kind_from(config_.summary),
           .staged = staged(layer),
           .summaries = summaries(layer),
           .predictors = arrays_.predictors(parity_),
           .summary_pages = tables_.summary_pages(),
           .summary_stride = static_cast<int>(tables_.summary_stride),
           .splits = arrays_.score_splits(parity_),
           .num_splits = arrays_.num_score_splits(parity_),
           .max_lane_tiles = static_cast<int>(div_up(lanes, kLaneTile)),
           .scores = scores(),
           .num_ctas = cut_.score_ctas},
          predict_);
    select({.heads = heads(),
            .combine = group_combine_from(config_.group_combine),
            .top_k = config_.top_k_blocks,
            .fetch_cap = config_.fetch_cap_blocks,
            .sink_blocks = config_.sink_blocks,
            .element_bytes = element_bytes_,
            .scores = scores(),
            .predictors = arrays_.predictors(parity_),
            .num_predictors = arrays_.num_predictors(parity_),
            .max_predictors = sizes_.predictors,
            .max_blocks = sizes_.score_blocks,
            .max_lanes = lanes,
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
            .host_base = host_->data(),
            .pool = pool(layer),
            .copies = copies(layer),
            .num_copies = num_copies_.as<int32_t>() + layer,
            .stats = tables_.stats()},
           predict_);
  }
  write_through(layer);
  now.predicted.record(predict_);
}

void CudaBackend::write_through(int layer) {
  if (sizes_.settled > 0)
    cuda::write_through({.dtype = dtype_,
                         .heads = heads(),
                         .blocks = arrays_.settled(parity_),
                         .num_blocks = arrays_.num_settled(parity_),
                         .pool = pool(layer),
                         .slot_pages = tables_.slot_pages(),
                         .fill_slots = fill_slots(layer),
                         .slot_stride = config_.top_k_blocks,
                         .host_units = tables_.host_units(),
                         .host_stride = tables_.host_stride(),
                         .host_step = config_.num_layers,
                         .host_offset = layer,
                         .host_base = host_->data()},
                        kWriteCtas, predict_);
}

void CudaBackend::transfer(int layer) {
  const LayerEvents& now = events(layer, plan_->step);
  now.predicted.hold(transfer_);
  if (layer == 0)  // in the order of the steps: what the next one waits for comes first
    events(config_.num_layers - 1, plan_->step - 1).transferred.hold(transfer_, capturing_);
  now.attended.hold(transfer_);
  if (sizes_.gather_ctas > 0)
    gather(copies(layer), num_copies_.as<int32_t>() + layer, head_bytes_, sizes_.gather_ctas,
           transfer_);
  now.transferred.record(transfer_, capturing_);
}

// What select has counted, as of this step.
void CudaBackend::count_selections() {
  const int64_t bytes = int64_t{config_.max_batch_size} * Tables::kStats * 8;
  check(cudaMemcpyAsync(stats_.data() + parity_ * bytes, tables_.stats(), bytes,
                        cudaMemcpyDeviceToHost, predict_),
        "statistics");
  counted_[parity_].record(predict_, capturing_);
}

// Waits for all that is under way, so that what comes next finds no half of a step.
void CudaBackend::abort() {
  if (!plan_) return;
  const auto plan = std::move(plan_);
  plan_ = nullptr;
  if (capturing_) {
    capturing_ = false;
    Graph::cancel_capture(foreground_);
  }
  last_step_ = plan->step;
  drain();
}

}  // namespace oasis::cuda
