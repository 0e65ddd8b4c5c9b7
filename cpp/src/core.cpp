#include "core.h"

#include <string>

#include "backend/cpu/cpu_backend.h"
#ifdef OASIS_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace oasis {
namespace {

CoreConfig validated(CoreConfig c) {
  c.validate();
  return c;
}

std::unique_ptr<Backend> make_backend(const CoreConfig& c, const float* cos, const float* sin) {
  if (c.backend == "cpu") return std::make_unique<cpu::CpuBackend>(c, cos, sin);
#ifdef OASIS_CUDA
  return std::make_unique<cuda::CudaBackend>(c, cos, sin);
#else
  throw std::invalid_argument(
      "backend = 'cuda': this build has no CUDA; `python3 build.py setup --cuda` makes one");
#endif
}

}  // namespace

Core::Core(CoreConfig config, const float* cos, const float* sin)
    : config_(validated(std::move(config))),
      pools_(config_),
      backend_(make_backend(config_, cos, sin)),
      scheduler_(std::make_unique<Scheduler>(config_, pools_, *backend_)) {}

Core::~Core() {
  backend_.reset();  // what it has under way names sequences that the scheduler owns
}

std::vector<std::pair<RequestId, int>> Core::begin_step() {
  if (step_)
    throw std::logic_error("begin_step() before commit() or abort_step() of the last step");
  return scheduler_->begin_step();
}

std::shared_ptr<const StepPlan> Core::plan(const std::map<RequestId, int>& drafts) {
  if (step_) throw std::logic_error("plan() before commit() or abort_step() of the last step");
  auto plan = scheduler_->plan(drafts);
  if (!plan) return nullptr;
  step_ = std::move(plan);
  last_step_ = step_->step;
  next_layer_ = 0;
  ran_ = false;
  try {
    backend_->begin(step_);
  } catch (...) {
    abort_step();
    throw;
  }
  return step_;
}

void Core::forward(int layer, const void* qkv, void* out) {
  if (!step_ || layer != next_layer_)
    throw std::logic_error("forward(" + std::to_string(layer) + ") out of order");
  ran_ = true;
  backend_->forward(layer, qkv, out);
  ++next_layer_;
}

void Core::commit(const std::map<RequestId, int>& new_tokens) {
  if (!step_ || next_layer_ != config_.num_layers)
    throw std::logic_error("commit() before every layer's forward()");
  scheduler_->commit(*step_, new_tokens);
  step_.reset();
}

void Core::abort_step() {
  if (!step_) return;
  if (ran_) scheduler_->break_off(*step_);
  step_.reset();  // whatever comes of the rest: a core that keeps its step can end no request
  backend_->abort();
}

bool Core::end(RequestId id, std::vector<BlockName> names) {
  if (step_) throw std::logic_error("end() during a step");
  return scheduler_->end(id, std::move(names));
}

RequestStats Core::stats(RequestId id, int64_t step) {
  const Request* r = scheduler_->find(id);
  if (!r || !r->seq) return {};
  const auto& [before, last] = r->seq->stats_before;
  return {step > 0 && step < last ? before : r->seq->stats,
          backend_->stats(*r->seq, step > 0 ? step : last_step_)};
}

#ifdef OASIS_CUDA
cuda::CudaBackend& Core::cuda() {
  auto* backend = dynamic_cast<cuda::CudaBackend*>(backend_.get());
  if (!backend) throw std::logic_error("this core's backend is " + config_.backend);
  return *backend;
}

void Core::begin_capture() {
  if (!step_ || next_layer_ != 0) throw std::logic_error("begin_capture() out of order");
  cuda().begin_capture();
}

bool Core::end_capture() {
  next_layer_ = 0;
  return cuda().end_capture();
}

void Core::launch() {
  if (!step_ || next_layer_ != 0) throw std::logic_error("launch() out of order");
  ran_ = true;
  cuda().launch();
  next_layer_ = config_.num_layers;
}
#endif

Usage Core::usage() {
  return {pools_.device.size(),
          pools_.device.free_count(),
          pools_.host.size(),
          pools_.host.free_count(),
          pools_.summary.size(),
          pools_.summary.free_count(),
          scheduler_->count(RequestState::kWaiting),
          scheduler_->count(RequestState::kPrefill),
          scheduler_->count(RequestState::kDecode),
          scheduler_->count(RequestState::kPreempted),
          pools_.host.blocks_cached(),
          pools_.host.blocks_reused(),
          pools_.host.blocks_evicted()};
}

}  // namespace oasis
