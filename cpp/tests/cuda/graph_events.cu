// Litmus test: does a decode step captured as one graph keep the order that docs/design.md,
// section 10, gives it?
//
// It enqueues what CudaBackend does, with the same streams, events and external nodes, but kernels
// that spin for random times and check, in device memory, that what must come before them is done
// and that what must come after has not been: from their begin to their end. For each layer l of
// step t, where ' marks what other steps wait for (under capture an external node):
//
//   foreground  wait transferred'(l, t-1) | append | record staged | attend | record attended
//   predict     wait staged; l = 0: wait counted'(t-1) | predict | record predicted;
//               after the last layer: copy the statistics to the host | record counted'(t)
//   transfer    wait predicted; l = 0: wait transferred'(L-1, t-1); wait attended | gather |
//               record transferred'(l, t)
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
// Beside the order it shows that first waits on events never recorded pass, that a wait, within a
// graph or outside, takes the last record launched before it, and that eager steps, other sizes,
// captures while steps are under way and a host far ahead change nothing; and that steps overlap.
// Faults must be caught. The owners of streams, events and graphs are the backend's own.
//
//   graph_events [steps]     one line a scenario; exit code 0 if all is as it must be
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <random>

#include "backend/cuda/step_graphs.h"
#include "step_order.cuh"

namespace {

using namespace oasis::cuda;

constexpr int kSizes = 3;
constexpr int kAdmitEvery = 11, kStatisticsEvery = 5;  // steps

constexpr Spins kNoDelay{0, 0}, kEven{10000, 10000};
constexpr Spins kSlowForeground{20000, 2000}, kSlowBackground{2000, 20000};

enum Fault {
  kNone,
  kTransferNotAwaited,    // by the foreground
  kTransferredInside,     // is recorded within the graph alone
  kTransferredTooEarly,   // is recorded before the gather
  kAttentionNotAwaited,   // by the gather
  kGathersUnordered,      // those of two steps
  kStatisticsNotAwaited,  // by the next step's predictions
  kForegroundNotAwaited,  // by the next step and its upload
  kUploadTooEarly,        // once the host has seen the foreground of t-2 end
  kBackgroundNotAwaited,  // by what touches whole requests
};

struct Scenario {
  const char* name;
  Spins spins;
  bool sizes = false;         // another one each step
  int eager_every = 0;        // every n-th step is eager, as prefill is
  bool ahead = false;         // the host waits for room to upload alone, not for tokens
  bool must_overlap = false;  // steps
  Fault fault = kNone;
};

// ------------------------------------------------------------ steps, as CudaBackend enqueues them

class Harness {  // a new one, and so events never recorded, for each scenario
 public:
  explicit Harness(const Scenario& scenario) : scenario_(scenario), fault_(scenario.fault) {
    check(cudaMemset(state_, 0, sizeof(State)), "state");
    check(cudaDeviceSynchronize(), "state");
  }
  ~Harness() { cudaDeviceSynchronize(); }

  struct Result {
    unsigned long long violations, overlaps;
    int graphs;  // launched
  };

  Result run(int steps) {
    for (long long t = 1; t <= steps; ++t) {
      launch(t);
      if (!scenario_.ahead && t > 1) read(t - 1);
    }
    check(cudaDeviceSynchronize(), "steps");
    State end;
    check(cudaMemcpy(&end, state_, sizeof end, cudaMemcpyDeviceToHost), "state");
    for (int stage = 0; stage < kStages; ++stage)  // nothing was lost
      for (int l = 0; l < (stage == kSample ? 1 : kLayers); ++l)
        end.violations += end.done[stage][l] != steps;
    end.violations += end.predictions != 1ll * steps * kLayers;
    return {end.violations + wrong_reads_, end.overlaps, graphs_launched_};
  }

 private:
  struct LayerEvents {
    Event staged, predicted, attended, transferred;
  };
  LayerEvents& events(int layer, long long t) { return events_[layer][t & 1]; }

  void launch(long long t) {
    if (t % kAdmitEvery == 0) {
      if (fault_ != kBackgroundNotAwaited) events(kLayers - 1, t - 1).transferred.hold(foreground_);
      admit<<<1, 1, 0, foreground_>>>(state_, t);
      check(cudaGetLastError(), "admit");
    }
    upload(t);
    const int size = scenario_.sizes ? static_cast<int>(random_() % kSizes) : 0, parity = t & 1;
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

  // Pinned memory is written again when the stream is past the copy out of it.
  void upload(long long t) {
    const int part = t % kRingParts;
    passed_[part].synchronize();
    pinned_->ring[part] = {t, static_cast<unsigned>(random_()), scenario_.spins};
    const Stream& stream = fault_ == kUploadTooEarly ? early_ : foreground_;
    check(cudaMemcpyAsync(&state_->metadata[t & 1], &pinned_->ring[part], sizeof(Metadata),
                          cudaMemcpyHostToDevice, stream),
          "upload");
    passed_[part].record(stream);
    if (fault_ == kUploadTooEarly) passed_[part].hold(foreground_);
  }

  void capture(Graph& graph, long long t, int size) {
    Graph::begin_capture(foreground_);
    capturing_ = true;
    enqueue(t, size);
    foreground_done_[t & 1].record(foreground_, true);
    counted_in_.record(predict_);
    counted_in_.hold(foreground_);
    moved_.record(transfer_);
    moved_.hold(foreground_);
    capturing_ = false;
    if (!graph.end_capture(foreground_)) throw std::bad_alloc();
  }

  void enqueue(long long t, int size) {
    const int parity = t & 1;
    for (int l = 0; l < kLayers; ++l) {
      const LayerEvents& now = events(l, t);
      if (fault_ != kTransferNotAwaited) events(l, t - 1).transferred.hold(foreground_, capturing_);
      stage(kAppend, l, size, parity, foreground_);
      now.staged.record(foreground_);
      predict(l, t, size);
      stage(kAttend, l, size, parity, foreground_);
      now.attended.record(foreground_);
      transfer(l, t, size);
    }
    check(cudaMemcpyAsync(&pinned_->counted[parity], &state_->predictions, sizeof(long long),
                          cudaMemcpyDeviceToHost, predict_),
          "statistics");
    counted_[parity].record(predict_, capturing_);
    stage(kSample, 0, size, parity, foreground_);
  }

  void predict(int l, long long t, int size) {
    const LayerEvents& now = events(l, t);
    now.staged.hold(predict_);
    if (l == 0 && fault_ != kStatisticsNotAwaited) counted_[(t - 1) & 1].hold(predict_, capturing_);
    stage(kPredict, l, size, t & 1, predict_);
    now.predicted.record(predict_);
  }

  void transfer(int l, long long t, int size) {
    const LayerEvents& now = events(l, t);
    now.predicted.hold(transfer_);
    if (l == 0 && fault_ != kGathersUnordered)
      events(kLayers - 1, t - 1).transferred.hold(transfer_, capturing_);
    if (fault_ != kAttentionNotAwaited) now.attended.hold(transfer_);
    if (fault_ == kTransferredTooEarly) now.transferred.record(transfer_, capturing_);
    stage(kGather, l, size, t & 1, transfer_);
    // An internal record makes no node. Made of `transferred` itself it would also leave that one
    // in the state of a capture that is over.
    const bool inside = capturing_ && fault_ == kTransferredInside;
    if (!inside && fault_ != kTransferredTooEarly) now.transferred.record(transfer_, capturing_);
  }

  void stage(Stage stage, int layer, int size, int parity, cudaStream_t stream) {
    run_stage<<<1 + size, 1, 0, stream>>>(state_, pinned_, stage, layer, parity);
    check(cudaGetLastError(), "stage");
  }

  // As the engine reads a step's tokens once the next is launched; statistics now and then.
  void read(long long t) {
    foreground_done_[t & 1].synchronize();
    wrong_reads_ += pinned_->tokens[t & 1] != t;
    if (t % kStatisticsEvery > 0) return;
    counted_[t & 1].synchronize();
    wrong_reads_ += pinned_->counted[t & 1] != t * kLayers;
  }

  const Scenario& scenario_;
  const Fault fault_;
  Stream foreground_{Priority::kMiddle}, predict_{Priority::kLow}, transfer_{Priority::kHigh};
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
  int graphs_launched_ = 0;
};

bool run(const Scenario& c, int steps) {
  std::printf("%-40s ", c.name);
  std::fflush(stdout);
  alarm(60 + steps / 50);  // a wait that never ends ends the test
  const Harness::Result r = Harness(c).run(steps);
  const bool overlap = r.overlaps > static_cast<unsigned long long>(steps);
  const bool good =
      c.fault == kNone ? r.violations == 0 && (overlap || !c.must_overlap) : r.violations > 0;
  std::printf("steps=%d graphs=%d overlaps=%llu violations=%llu%s %s\n", steps, r.graphs,
              r.overlaps, r.violations, c.fault == kNone ? "" : " (must be caught)",
              good ? "ok" : "FAILED");
  return good;
}

constexpr Scenario kScenarios[] = {
    {.name = "no delay", .spins = kNoDelay},
    {.name = "random delays", .spins = kEven},
    {.name = "slow foreground", .spins = kSlowForeground},
    {.name = "slow background, steps overlap", .spins = kSlowBackground, .must_overlap = true},
    {.name = "sizes change", .spins = kEven, .sizes = true},
    {.name = "every 7th step eager", .spins = kEven, .sizes = true, .eager_every = 7},
    {.name = "every other step eager", .spins = kEven, .sizes = true, .eager_every = 2},
    {.name = "eager only", .spins = kEven, .sizes = true, .eager_every = 1},
    {.name = "far ahead, no delay", .spins = kNoDelay, .sizes = true, .ahead = true},
    {.name = "far ahead, every 7th step eager",
     .spins = kSlowBackground,
     .sizes = true,
     .eager_every = 7,
     .ahead = true},
};
constexpr Scenario faulty(const char* name, Spins spins, Fault fault) {
  return {.name = name, .spins = spins, .fault = fault};
}
constexpr Scenario kFaults[] = {
    faulty("foreground before the transfer", kSlowBackground, kTransferNotAwaited),
    faulty("transferred within the graph alone", kSlowBackground, kTransferredInside),
    faulty("transferred before the gather", kSlowBackground, kTransferredTooEarly),
    faulty("gather before attention", kSlowForeground, kAttentionNotAwaited),
    faulty("gathers not in the order of steps", kSlowBackground, kGathersUnordered),
    faulty("prediction before the statistics", kSlowBackground, kStatisticsNotAwaited),
    faulty("step before the foreground of the last", kEven, kForegroundNotAwaited),
    faulty("upload within the background", kSlowBackground, kUploadTooEarly),
    faulty("admission within the background", kSlowBackground, kBackgroundNotAwaited),
};

}  // namespace

int main(int argc, char** argv) try {
  const int steps = std::max(200, argc > 1 ? std::atoi(argv[1]) : 5000);
  bool good = true;
  for (const Scenario& c : kScenarios) good = run(c, steps) && good;
  for (const Scenario& c : kFaults) good = run(c, std::max(200, steps / 10)) && good;
  std::puts(good ? "ok" : "FAILED");
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "graph_events: %s\n", error.what());
  return 2;
}
