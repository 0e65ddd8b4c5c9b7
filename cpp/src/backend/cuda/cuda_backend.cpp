#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "ops/cuda/moves.h"

namespace oasis::cuda {
namespace {

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

int decode_tiles(const CoreConfig& c) {
  return static_cast<int>(div_up((1 + c.max_draft_len) * c.group(), kLaneTile));
}

// The most blocks that selection serves. What the kernels cannot serve is refused before anything
// is allocated.
int checked_select_blocks(const CoreConfig& c) {
  if (c.max_num_tokens > 65535) refuse("max_num_tokens", c.max_num_tokens, "at most 65535 on CUDA");
  if (!c.sparse_enabled) return 0;
  const int most = select_max_blocks(c.top_k_blocks, std::max(1, c.max_draft_len) * c.group());
  const int64_t blocks = blocks_for(c.max_seq_len);
  if (blocks > most) {
    const std::string rule = "at most " + std::to_string(most * kBlockTokens) +
                             " on CUDA with this top_k_blocks and draft_len";
    refuse("max_seq_len", c.max_seq_len, rule.c_str());
  }
  if (std::min<int64_t>(c.top_k_blocks, blocks) > kMostSlots)
    refuse("top_k_blocks", c.top_k_blocks, "at most 12288 on CUDA");
  return most;
}

}  // namespace

CudaBackend::CudaBackend(const CoreConfig& config, const float* cos, const float* sin)
    : config_(config),
      device_(current_device()),
      sms_(multiprocessors()),
      gather_shares_(config.gather_shares),
      max_select_blocks_(checked_select_blocks(config)),
      events_(2 * config.num_layers),
      tables_(config),
      arrays_(config),
      buffers_(config, tables_, arrays_, decode_tiles(config), cos, sin),
      kernels_(config, tables_, arrays_, buffers_),
      ring_(std::max({arrays_.max_bytes(), 4 * tables_.host_stride(),
                      tables_.max_blocks * int64_t{sizeof(SettledBlock)}}),
            foreground_),
      stats_(2 * 8ll * Tables::kStats * config.max_batch_size, "statistics") {
  std::memset(stats_.data(), 0, 2 * 8ll * Tables::kStats * config.max_batch_size);
}

// The thread that drives a core need not be the one that made it.
void CudaBackend::use_device() { check(cudaSetDevice(device_), "device"); }

void CudaBackend::share_sms(std::vector<GatherShare> shares) {
  CoreConfig::check_shares(shares);
  drain();
  graphs_.clear();
  gather_shares_ = std::move(shares);
}

// The more of the link a step needs, the more SMs its gather gets: under load one alone moves less.
const GatherShare& CudaBackend::share_for(int64_t requests) const {
  const int64_t bytes = requests * config_.num_layers * config_.num_kv_heads *
                        config_.fetch_cap_blocks * buffers_.head_bytes;
  for (const GatherShare& s : gather_shares_)
    if (bytes <= s.link_bytes) return s;
  return gather_shares_.back();
}

CudaBackend::~CudaBackend() { cudaDeviceSynchronize(); }

// The foreground goes on after all that is under way.
void CudaBackend::join() {
  if (last_step_ == 0 || !background()) return;
  const int first = std::max(0, config_.num_layers - LayerKernels::kGathers);
  wait_flags(buffers_.transferred(first), config_.num_layers - first, nullptr, last_step_, {},
             foreground_);
}

LookaheadStats CudaBackend::stats(const SequenceKv& seq, int64_t step) {
  if (step == 0) return {};
  counted_[parity_of(step)].synchronize();
  const auto* n =
      reinterpret_cast<const int64_t*>(stats_.data()) +
      (int64_t{parity_of(step)} * config_.max_batch_size + seq.row().value) * Tables::kStats;
  return {n[0], n[1], n[2], n[1] * buffers_.head_bytes, static_cast<double>(n[3]) / 1e6};
}

void CudaBackend::drain() {
  use_device();
  foreground_.synchronize();
  predict_.synchronize();
  for (const Stream& s : transfers_) s.synchronize();
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
  plan_ = std::move(plan);  // from here on abort() ends it
  use_device();
  parity_ = parity_of(plan_->step);
  next_layer_ = 0;
  for (const RowGroup& g : plan_->groups)
    if (g.grows) {  // its new slot, in time for the block that settles into it
      const size_t slot = g.seq->pages().size() - 1;
      ring_.upload(tables_.slot_pages(g.seq->row()) + slot, &g.seq->pages()[slot], 4);
    }
  plan_sizes();
  arrays_.send(*plan_, cut_, ring_);
  kernels_.set_step(parity_, sizes_, cut_);
}

// Decode steps run at one of few sizes: eagerly at first, then captured.
void CudaBackend::plan_sizes() {
  sizes_ = {};
  sizes_.rows = static_cast<int>(plan_->rows);
  bool decode = config_.captured_sizes > 0 && !config_.trace;
  int tiles = 1;
  for (const RowGroup& g : plan_->groups) {
    sizes_.logits_rows += g.logits_rows;
    sizes_.settled += static_cast<int>(g.settle_to - g.settle_from);
    sizes_.drafted += g.drafts > 0;
    decode = decode && g.kind != RowKind::kPrefill && g.settle_to - g.settle_from <= 1;
    if (g.kind != RowKind::kPrefill || buffers_.dtype == DType::kFloat32)
      tiles = std::max(tiles, static_cast<int>(div_up(g.rows * config_.group(), kLaneTile)));
    if (!g.predicts) continue;
    ++sizes_.predictors;
    sizes_.score_blocks = std::max(sizes_.score_blocks, static_cast<int>(g.settle_to));
    sizes_.staged_rows = std::max(sizes_.staged_rows, g.staged_rows);
  }
  graph_ = nullptr;
  size_.reset();
  if (decode) {
    const auto requests = static_cast<int>(plan_->groups.size());
    const auto each = [&](int rows) { return static_cast<int>(div_up(rows, requests)); };
    const StepSize size{std::min(request_bucket(requests), config_.max_batch_size),
                        each(sizes_.rows), each(sizes_.logits_rows),
                        sizes_.predictors > 0
                            ? std::min(block_bucket(sizes_.score_blocks), max_select_blocks_)
                            : 0};
    size_ = size;
    sizes_.rows = size.requests * size.rows_each;
    sizes_.logits_rows = size.requests * size.logits_each;
    sizes_.settled = sizes_.drafted = size.requests;
    sizes_.predictors = sizes_.predictors > 0 ? size.requests : 0;
    sizes_.score_blocks = size.score_blocks;
    sizes_.staged_rows = std::max(1, config_.max_draft_len);
    tiles = decode_tiles(config_);
  }
  if (sizes_.predictors > 0) {
    sizes_.share = share_for(sizes_.predictors);
    sizes_.share.ctas = static_cast<int>(div_up(sizes_.share.ctas, LayerKernels::kGathers)) *
                        LayerKernels::kGathers;
  }
  // Where the gather's CTAs are, others have no room: theirs would run after all the rest.
  cut_.decode = decode;
  cut_.attention_ctas = (sms_ - sizes_.share.ctas) * attention_ctas_per_sm();
  cut_.score_ctas = (sms_ - sizes_.share.ctas) * score_ctas_per_sm();
  cut_.lane_tiles = tiles;
  cut_.padded_rows = sizes_.rows;
  cut_.padded_logits = sizes_.logits_rows;
}

CudaBackend::StepView CudaBackend::view(int variant) {
  if (size_ && variant != kEager) {
    size_->variant = variant;
    graph_ = &graphs_[*size_];
    graph_->used = plan_->step;
    if (static_cast<int>(graphs_.size()) > config_.captured_sizes) drop_oldest_graph();
  }
  const bool warmed = graph_ && graph_->warmed, captured = warmed && graph_->step[parity_];
  return {sizes_.rows,
          sizes_.logits_rows,
          sizes_.drafted,
          captured,
          warmed && !captured && !graph_->refused,
          size_.has_value(),
          sizes_.share,
          arrays_.rows(parity_),
          arrays_.logits_rows(parity_),
          arrays_.drafted_requests(parity_)};
}

// The graph may still run: CUDA frees it after.
void CudaBackend::drop_oldest_graph() {
  graphs_.erase(std::min_element(graphs_.begin(), graphs_.end(), [](const auto& a, const auto& b) {
    return a.second.used < b.second.used;
  }));
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
  if (background()) kernels_.hold(layer, foreground_);
  kernels_.append(layer, qkv, foreground_);
  if (background()) {
    events(layer, plan_->step).staged.record(foreground_);
    predict(layer);
  }
  if (out) kernels_.attend(layer, out, foreground_);
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

int CudaBackend::captured_steps() const {
  int count = 0;
  for (const auto& [size, graphs] : graphs_)
    for (const Graph& graph : graphs.step) count += graph ? 1 : 0;
  return count;
}

void CudaBackend::begin_capture() {
  Graph::begin_capture(foreground_);
  capturing_ = true;
}

bool CudaBackend::end_capture() {
  foreground_done_[parity_].record(foreground_, true);
  if (background()) {
    counted_in_.record(predict_);
    counted_in_.hold(foreground_);
    for (int i = 0; i < std::min(LayerKernels::kGathers, config_.num_layers); ++i) {
      moved_in_.record(transfers_[i]);
      moved_in_.hold(foreground_);
    }
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

// ------------------------------------------------------------ a layer's background

void CudaBackend::predict(int layer) {
  const LayerEvents& now = events(layer, plan_->step);
  now.staged.hold(predict_);
  if (layer == 0) counted_[parity_ ^ 1].hold(predict_, capturing_);
  kernels_.write_through(layer, predict_);
  kernels_.score(layer, predict_);
  kernels_.select(layer, predict_);
  now.predicted.record(predict_);
}

void CudaBackend::transfer(int layer) {
  constexpr int kGathers = LayerKernels::kGathers;
  const LayerEvents& now = events(layer, plan_->step);
  const Stream& stream = transfers_[layer % kGathers];
  now.predicted.hold(stream);
  if (layer < kGathers) {  // in the order of the steps: what the next one waits for comes first
    const int last = config_.num_layers - 1, before = last - (last - layer) % kGathers;
    wait_flags(buffers_.transferred(before), 1, arrays_.step(parity_), 0, {}, stream);
  }
  now.attended.hold(stream);
  kernels_.gather(layer, stream);
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
  if (background())
    set_flags(buffers_.transferred(0), config_.num_layers, nullptr, last_step_, foreground_);
}

}  // namespace oasis::cuda
