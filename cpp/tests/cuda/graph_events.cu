// Litmus test: does a decode step captured as one graph keep the order that docs/design.md,
// section 10, gives it?
//
// It enqueues what CudaBackend does, with the same streams, flags, events and external nodes, but
// kernels that spin for random times and check, in device memory, that what must come before them
// is done and that what must come after has not been: from their begin to their end. For each layer
// l of step t, where ' marks an event that other steps wait for (under capture an external node),
// and transferred is a flag in device memory that a kernel waits for:
//
//   foreground  every 4th layer: wait transferred(l .. l+3, t-1) | append | record staged | attend
//   |
//               record attended
//   predict     wait staged; l = 0: wait counted'(t-1) | predict | record predicted;
//               after the last layer: copy the statistics to the host | record counted'(t)
//   transfer    two streams in turn; wait predicted; first layer: wait transferred(its last, t-1);
//               wait attended | gather, which sets transferred(l, t)
//
// The foreground ends with sampling and foreground_done'(t). The graph of step t is launched on one
// of two streams, by the parity of t, after all that the foreground stream holds, which then waits
// for foreground_done'(t) alone: the background of t runs on beside the foreground of t + 1.
//
// Metadata (the step's number, how long to spin) is uploaded on the foreground stream into one of
// two buffers by parity. No wait of the host keeps step t from overwriting what the background of
// t-2 reads, as the end of that step's foreground says nothing of it: the upload comes after
// foreground_done'(t-1), and in each layer the foreground of t-1 came after the transfer, and so
// the prediction, of t-2. Every kernel checks that it is so.
//
// A gather stores as the real one does, by bulk copies, and what waited for its flag reads that. A
// kernel that waits must never keep from running what it waits for: not where all streams share one
// hardware queue, nor where kernels of the foreground fill the GPU, nor after a step or a capture
// that broke off.
//
// Beside the order it shows that first waits on events never recorded pass, that a wait, within a
// graph or outside, takes the last record launched before it, and that eager steps, other sizes,
// captures while steps are under way and a host far ahead change nothing; and that steps overlap.
// Faults must be caught; they may stop the steps. The owners of streams, events and graphs are the
// backend's own, and so are the kernels that wait and set flags.
//
//   graph_events [steps [connections]]   one line a scenario; exit code 0 if all is as it must be
//
// connections: of the host to the device (CUDA_DEVICE_MAX_CONNECTIONS), hardware queues that
// streams share. Given, the right scenarios run alone and need not overlap; else first with one.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <random>
#include <string>
#include <thread>

#include "backend/cuda/step_graphs.h"
#include "ops/cuda/flags.h"
#include "step_order.cuh"
#include "step_scenarios.cuh"

namespace {

using namespace oasis::cuda;

constexpr int kSizes = kMostBlocks;
constexpr int kAdmitEvery = 5, kStatisticsEvery = 7;                         // steps
constexpr int kForegroundShared = 150 << 10, kBackgroundShared = 100 << 10;  // not on one SM

// Lets steps go on, whatever they wait for, once none has been launched for some seconds.
class Watchdog {
 public:
  explicit Watchdog(State* state, const Pinned* pinned) : state_(state), pinned_(pinned) {}
  ~Watchdog() {
    over_ = true;
    thread_.join();
  }
  void beat() { ++beats_; }
  bool stuck() const { return stuck_; }

 private:
  void watch() {
    int quiet = 0, last = 0;
    for (; !over_; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
      const int beats = beats_;
      quiet = beats == last ? quiet + 1 : 0;
      last = beats;
      if (quiet < 100 && !stuck_) continue;
      stuck_ = true;  // a copy, as a kernel might find its queue full of those that wait
      cudaMemcpyAsync(state_->transferred, pinned_->let_go, sizeof state_->transferred,
                      cudaMemcpyHostToDevice, stream_);
    }
  }

  State* state_;
  const Pinned* pinned_;
  Stream stream_{Priority::kHigh};
  std::atomic<int> beats_ = 0;
  std::atomic<bool> stuck_ = false, over_ = false;
  std::thread thread_{[this] { watch(); }};
};

// ------------------------------------------------------------ steps, as CudaBackend enqueues them

class Harness {  // a new one, and so events never recorded, for each scenario
 public:
  explicit Harness(const Scenario& scenario) : scenario_(scenario), fault_(scenario.fault) {
    check(cudaMemset(state_, 0, sizeof(State)), "state");
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0), "device");
    check(cudaFuncSetAttribute(run_stage, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kForegroundShared),
          "shared memory");
    check(cudaDeviceSynchronize(), "state");
    std::fill(std::begin(pinned_->let_go), std::end(pinned_->let_go), INT64_MAX);
  }
  ~Harness() { cudaDeviceSynchronize(); }

  struct Result {
    unsigned long long violations, overlaps;
    int graphs;  // launched
    bool stuck;
  };

  Result run(int steps) {
    Watchdog watchdog(state_, pinned_);
    for (int64_t t = 1; t <= steps && !watchdog.stuck(); ++t) {
      launch(t);
      if (!scenario_.ahead && t > 1) read(t - 1);
      watchdog.beat();
    }
    check(cudaDeviceSynchronize(), "steps");
    State end;
    check(cudaMemcpy(&end, state_, sizeof end, cudaMemcpyDeviceToHost), "state");
    for (int stage = 0; stage < kStages; ++stage)  // nothing was lost
      for (int l = 0; l < (stage == kSample ? 1 : kLayers); ++l)
        end.violations += end.done[stage][l] != steps;
    end.violations += end.predictions != int64_t{steps} * kLayers;
    return {end.violations + wrong_reads_, end.overlaps, graphs_launched_, watchdog.stuck()};
  }

 private:
  struct LayerEvents {
    Event staged, predicted, attended;
  };
  LayerEvents& events(int layer, int64_t t) { return events_[layer][t & 1]; }
  const int64_t* step(int64_t t) const { return &state_->metadata[t & 1].step; }
  int64_t* transferred(int layer) const { return state_->transferred + layer; }

  void launch(int64_t t) {
    if (t % kAdmitEvery == 0) {
      join(t - 1);
      admit<<<1, 1, 0, foreground_>>>(state_, t);
      check(cudaGetLastError(), "admit");
    }
    upload(t);
    const int size = scenario_.sizes ? static_cast<int>(random_() % kSizes) : 0, parity = t & 1;
    blocks_before_ = 1 + size;
    if (scenario_.abort_every > 0 && t % scenario_.abort_every == 0) return break_off(t, size);
    const bool eager = scenario_.eager_every > 0 && t % scenario_.eager_every == 0;
    if (eager || !warmed_[size]) {
      warmed_[size] = true;
      enqueue(t, size);
      foreground_done_[parity].record(foreground_);
      return;
    }
    Graph& graph = graphs_[size][parity];
    if (!graph) capture(graph, t, size);
    ready_.record(foreground_);
    ready_.hold(graph_streams_[parity]);
    graph.launch(graph_streams_[parity]);
    if (fault_ != kForegroundNotAwaited) foreground_done_[parity].hold(foreground_);
    ++graphs_launched_;
  }

  void join(int64_t t) {
    if (t == 0 || fault_ == kBackgroundNotAwaited) return;
    const int first = kLayers - (fault_ == kOneStreamAwaited ? 1 : kGathers);
    wait_flags(transferred(first), kLayers - first, nullptr, t, {}, foreground_);
  }

  // Pinned memory is written again when the stream is past the copy out of it.
  void upload(int64_t t) {
    const int part = t % kRingParts;
    passed_[part].synchronize();
    pinned_->ring[part] = {t, static_cast<unsigned>(random_()), scenario_.spins, blocks_before_};
    const Stream& stream = fault_ == kUploadTooEarly ? early_ : foreground_;
    check(cudaMemcpyAsync(&state_->metadata[t & 1], &pinned_->ring[part], sizeof(Metadata),
                          cudaMemcpyHostToDevice, stream),
          "upload");
    passed_[part].record(stream);
    if (fault_ == kUploadTooEarly) passed_[part].hold(foreground_);
  }

  void capture(Graph& graph, int64_t t, int size) {
    begin_capture();
    enqueue(t, size);
    foreground_done_[t & 1].record(foreground_, true);
    counted_in_.record(predict_);
    counted_in_.hold(foreground_);
    for (const Stream& s : transfers_) {
      moved_.record(s);
      moved_.hold(foreground_);
    }
    capturing_ = false;
    if (!graph.end_capture(foreground_)) throw std::bad_alloc();
  }

  void begin_capture() {
    Graph::begin_capture(foreground_);
    capturing_ = true;
  }

  // As abort() does after an exception within a layer.
  void break_off(int64_t t, int size) {
    if (random_() % 2) begin_capture();
    enqueue(t, size, static_cast<int>(random_() % kLayers));
    if (capturing_) {
      capturing_ = false;
      Graph::cancel_capture(foreground_);
    }
    for (const Stream* s : {&foreground_, &predict_, &transfers_[0], &transfers_[1],
                            &graph_streams_[0], &graph_streams_[1]})
      s->synchronize();
    set_flags(state_->transferred, kLayers, nullptr, t, foreground_);
    forget<<<1, 1, 0, foreground_>>>(state_, pinned_, t);
    check(cudaGetLastError(), "forget");
    blocks_before_ = 0;
    broken_off_ = t;
  }

  // Up to the middle of layer `end`.
  void enqueue(int64_t t, int size, int end = kLayers) {
    const int parity = t & 1;
    for (int l = 0; l < kLayers; ++l) {
      const LayerEvents& now = events(l, t);
      hold(l, t);
      stage(kAppend, l, size, parity, foreground_);
      now.staged.record(foreground_);
      predict(l, t, size);
      if (l == end) return;
      stage(kAttend, l, size, parity, foreground_);
      now.attended.record(foreground_);
      transfer(l, t, size);
    }
    check(cudaMemcpyAsync(&pinned_->counted[parity], &state_->predictions, sizeof(int64_t),
                          cudaMemcpyDeviceToHost, predict_),
          "statistics");
    counted_[parity].record(predict_, capturing_);
    stage(kSample, 0, size, parity, foreground_);
  }

  void hold(int l, int64_t t) {
    if (l % kHeldLayers != 0 || fault_ == kTransferNotAwaited) return;
    const int count = fault_ == kOneLayerAwaited ? 1 : std::min(kHeldLayers, kLayers - l);
    wait_flags(transferred(l), count, step(t), 0, {}, foreground_);
  }

  void predict(int l, int64_t t, int size) {
    const LayerEvents& now = events(l, t);
    now.staged.hold(predict_);
    if (l == 0 && fault_ != kStatisticsNotAwaited) counted_[(t - 1) & 1].hold(predict_, capturing_);
    stage(kPredict, l, size, t & 1, predict_);
    now.predicted.record(predict_);
  }

  void transfer(int l, int64_t t, int size) {
    const LayerEvents& now = events(l, t);
    const Stream& stream = transfers_[l % kGathers];
    now.predicted.hold(stream);
    if (l < kGathers && fault_ != kGathersUnordered)
      wait_flags(transferred(last_beside(l)), 1, step(t), 0, {}, stream);
    if (fault_ != kAttentionNotAwaited) now.attended.hold(stream);
    const DoneFlag flag = {transferred(l), state_->arrivals + l, step(t)};
    const bool early = fault_ == kTransferredTooEarly;
    const bool after = size == 1 && !early;  // set as where nothing is fetched
    if (early) set_flags(flag.flag, 1, flag.step, 0, stream);
    stage(kGather, l, size, t & 1, stream, early || after ? DoneFlag{} : flag);
    if (after) set_flags(flag.flag, 1, flag.step, 0, stream);
  }

  void stage(Stage stage, int layer, int size, int parity, cudaStream_t stream,
             const DoneFlag& flag = {}) {
    const bool background = stage == kPredict || stage == kGather, fill = scenario_.fill;
    const int blocks = fill && !background ? 2 * sms_ : 1 + size;
    const int shared = !fill ? 0 : background ? kBackgroundShared : kForegroundShared;
    run_stage<<<blocks, 1, shared, stream>>>(state_, pinned_, stage, layer, parity, flag);
    check(cudaGetLastError(), "stage");
  }

  // As the engine reads a step's tokens once the next is launched; statistics now and then.
  void read(int64_t t) {
    if (t == broken_off_) return;
    foreground_done_[t & 1].synchronize();
    wrong_reads_ += pinned_->tokens[t & 1] != t;
    if (t % kStatisticsEvery > 0) return;
    counted_[t & 1].synchronize();
    wrong_reads_ += pinned_->counted[t & 1] != t * kLayers;
  }

  const Scenario& scenario_;
  const Fault fault_;
  Stream foreground_{Priority::kMiddle}, predict_{Priority::kLow};
  Stream transfers_[kGathers] = {Stream(Priority::kHigh), Stream(Priority::kHigh)};
  Stream early_{Priority::kHigh};  // of a fault
  Stream graph_streams_[2] = {Stream(Priority::kMiddle), Stream(Priority::kMiddle)};
  LayerEvents events_[kLayers][2];
  Event foreground_done_[2], counted_[2], passed_[kRingParts];
  Event ready_, counted_in_, moved_;
  bool warmed_[kSizes] = {}, capturing_ = false;
  Graph graphs_[kSizes][2];
  DeviceMemory device_{sizeof(State), "state"};
  PinnedMemory host_{sizeof(Pinned), "pinned"};
  State* state_ = device_.as<State>();
  Pinned* pinned_ = new (host_.data()) Pinned{};
  std::mt19937 random_{1};
  unsigned long long wrong_reads_ = 0;
  int64_t broken_off_ = 0;  // the last such step
  int sms_ = 0, blocks_before_ = 0, graphs_launched_ = 0;
};

bool run(const Scenario& c, int steps, bool few_queues) {
  std::printf("%-40s ", c.name);
  std::fflush(stdout);
  alarm(60 + steps / 50);  // a wait that never ends ends the test
  const Harness::Result r = Harness(c).run(steps);
  const bool overlap = few_queues || r.overlaps > static_cast<unsigned long long>(steps);
  const bool good = c.fault == kNone ? r.violations == 0 && !r.stuck && (overlap || !c.must_overlap)
                                     : r.violations > 0 || r.stuck;
  std::printf("steps=%d graphs=%d overlaps=%llu violations=%llu%s%s %s\n", steps, r.graphs,
              r.overlaps, r.violations, r.stuck ? " stuck" : "",
              c.fault == kNone ? "" : " (must be caught)", good ? "ok" : "FAILED");
  return good;
}

bool run_all(int steps, bool few_queues) {
  bool good = true;
  for (const Scenario& c : kScenarios) good = run(c, steps, few_queues) && good;
  if (few_queues) return good;
  for (const Scenario& c : kFaults) good = run(c, std::max(200, steps / 10), false) && good;
  return good;
}

// CUDA reads the setting once in a process.
bool run_with_connections(int steps, const char* connections) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
  std::printf("CUDA_DEVICE_MAX_CONNECTIONS=%s\n", connections);
  return run_all(steps, true);
}

}  // namespace

int main(int argc, char** argv) try {
  const int steps = std::max(200, argc > 1 ? std::atoi(argv[1]) : 5000);
  bool good;
  if (argc > 2) {
    good = run_with_connections(steps, argv[2]);
  } else {
    const std::string count = std::to_string(steps);
    const pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", argv[0], count.c_str(), "1", nullptr);
      _exit(2);
    }
    int status = 0;
    good = child > 0 && waitpid(child, &status, 0) == child && status == 0;
    good = run_all(steps, false) && good;
  }
  std::puts(good ? "ok" : "FAILED");
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "graph_events: %s\n", error.what());
  return 2;
}
