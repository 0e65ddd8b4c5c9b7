// Litmus test: may a decode step be two CUDA graphs joined per layer by external event nodes?
//
// Foreground F(t) and background B(t), each a graph over kLayers layers:
//   F, layer l: wait transferred[l] of step t-1 -> fork kernel -> record forked[l] -> attention
//               kernel -> record attended[l]
//   B, layer l: wait forked[l] -> predict kernel -> wait attended[l] -> gather kernel -> record
//               transferred[l]
// Events belong to (layer, step parity), never to a graph. One thread launches F(t), B(t), F(t+1),
// B(t+1), ...; F on one stream, B on two by parity, at most two steps in flight. Every kernel spins
// for a random time and then checks that what must come before it has, and that what must not have
// happened yet has not: the step counters below are written and read by the kernels alone.
//
// What it answers: when does an external wait node sample its event, what do first waits on a
// never recorded event do, and does switching between execs of different sizes ("buckets") or
// between graph and eager steps break the order? Run it before building on any of this.
//
//   graph_events [steps]     prints one line a scenario; exit code 0 if all hold and the two
//                            scenarios that are launched in a wrong order are caught
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kLayers = 12, kBuckets = 3;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "graph_events: %s: %s\n", what, cudaGetErrorString(e));
  std::exit(2);
}
#define CHECK(call) check(call, #call)

enum Stage { kFork, kAttend, kPredict, kGather };

// done[stage][layer]: the last step whose stage ran there. violations: how often an order was seen
// broken.
struct State {
  long long done[4][kLayers];
  long long step[2];  // [parity]: the step that the launched graphs are for, set before the launch
  unsigned long long violations;
};

__device__ long long load(const long long* p) { return *(volatile const long long*)p; }

__global__ void stage_kernel(State* s, int stage, int layer, int parity, unsigned seed,
                             int max_spin) {
  const long long t = load(&s->step[parity]);
  const unsigned h =
      (seed * 2654435761u + static_cast<unsigned>(t) * 40503u + stage * 97u + layer * 131u) *
      2246822519u;
  const long long begin = clock64(), spin = max_spin ? (h >> 8) % max_spin : 0;
  while (clock64() - begin < spin) {
  }
  bool ok = load(&s->done[stage][layer]) == t - 1;  // each stage once a step, in order
  if (stage == kFork) ok = ok && load(&s->done[kGather][layer]) == t - 1;
  if (stage == kAttend) ok = ok && load(&s->done[kFork][layer]) == t;
  if (stage == kPredict) ok = ok && load(&s->done[kFork][layer]) == t;
  if (stage == kGather)
    ok = ok && load(&s->done[kPredict][layer]) == t && load(&s->done[kAttend][layer]) == t;
  if (!ok) atomicAdd(&s->violations, 1ull);
  __threadfence();
  *(volatile long long*)&s->done[stage][layer] = t;
  __threadfence();
}

__global__ void set_step(State* s, int parity, long long t) {
  *(volatile long long*)&s->step[parity] = t;
}

class Harness {
 public:
  Harness() {
    CHECK(cudaMalloc(&state_, sizeof(State)));
    CHECK(cudaStreamCreateWithFlags(&fg_, cudaStreamNonBlocking));
    for (cudaStream_t& s : bg_) CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (cudaEvent_t& e : ended_) CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    reset_events();
    for (int bucket = 0; bucket < kBuckets; ++bucket)
      for (int parity = 0; parity < 2; ++parity) {
        fg_exec_[bucket][parity] = capture(fg_, [&] {
          foreground(parity, bucket, cudaEventRecordExternal, cudaEventWaitExternal);
        });
        bg_exec_[bucket][parity] = capture(bg_[parity], [&] {
          background(parity, bucket, cudaEventRecordExternal, cudaEventWaitExternal);
        });
      }
  }

  // Fresh events: what a first wait does must not depend on an earlier scenario.
  void reset_events() {
    for (auto* set : {forked_, attended_, transferred_})
      for (int i = 0; i < 2 * kLayers; ++i) {
        if (set[i]) CHECK(cudaEventDestroy(set[i]));
        CHECK(cudaEventCreateWithFlags(&set[i], cudaEventDisableTiming));
      }
  }

  struct Scenario {
    const char* name;
    int spin;               // most cycles that a kernel spins
    bool buckets = false;   // another exec pair each step
    int eager_every = 0;    // every n-th step is launched without graphs
    bool reversed = false;  // B(t) before F(t): must be caught
    bool no_wait = false;   // F does not wait for B of the step before: must be caught
    bool deep = false;      // the host launches on without waiting for anything
  };

  unsigned long long run(const Scenario& c, int steps, unsigned seed) {
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemset(state_, 0, sizeof(State)));
    std::mt19937 rng(seed);
    for (long long t = 1; t <= steps; ++t) {
      if (!c.deep && t > 2) CHECK(cudaEventSynchronize(ended_[t & 1]));  // of step t - 2
      const int parity = t & 1, bucket = c.buckets ? static_cast<int>(rng() % kBuckets) : 0;
      // The step's number travels as its metadata would: by the foreground stream, before F(t).
      // B(t-2) has read it: F(t-1) waited for B(t-2)'s transfers of every layer, the last one
      // included.
      set_step<<<1, 1, 0, fg_>>>(state_, parity, t);
      CHECK(cudaGetLastError());
      const bool eager = c.eager_every && t % c.eager_every == 0;
      auto f = [&] {
        if (eager || c.no_wait)
          foreground(parity, bucket, 0, 0, c.no_wait);
        else
          CHECK(cudaGraphLaunch(fg_exec_[bucket][parity], fg_));
      };
      auto b = [&] {
        if (eager)
          background(parity, bucket, 0, 0);
        else
          CHECK(cudaGraphLaunch(bg_exec_[bucket][parity], bg_[parity]));
      };
      spin_ = c.spin;
      if (c.reversed) {
        b();
        f();
      } else {
        f();
        b();
      }
      CHECK(cudaEventRecord(ended_[parity], bg_[parity]));
    }
    CHECK(cudaDeviceSynchronize());
    State end;
    CHECK(cudaMemcpy(&end, state_, sizeof end, cudaMemcpyDeviceToHost));
    for (auto& stage : end.done)
      for (long long last : stage) end.violations += last != steps;  // nothing was lost
    return end.violations;
  }

 private:
  template <class F>
  cudaGraphExec_t capture(cudaStream_t stream, F body) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
  }

  void launch(cudaStream_t stream, Stage stage, int layer, int parity, int bucket) {
    stage_kernel<<<1, 32, 0, stream>>>(state_, stage, layer, parity, 17u * bucket + stage, spin_);
    CHECK(cudaGetLastError());
  }

  void foreground(int parity, int bucket, unsigned record, unsigned wait, bool no_wait = false) {
    for (int l = 0; l < kLayers; ++l) {
      const int now = parity * kLayers + l, before = (1 - parity) * kLayers + l;
      if (!no_wait) CHECK(cudaStreamWaitEvent(fg_, transferred_[before], wait));
      launch(fg_, kFork, l, parity, bucket);
      CHECK(cudaEventRecordWithFlags(forked_[now], fg_, record));
      launch(fg_, kAttend, l, parity, bucket);
      CHECK(cudaEventRecordWithFlags(attended_[now], fg_, record));
    }
  }

  void background(int parity, int bucket, unsigned record, unsigned wait) {
    cudaStream_t stream = bg_[parity];
    for (int l = 0; l < kLayers; ++l) {
      const int now = parity * kLayers + l;
      CHECK(cudaStreamWaitEvent(stream, forked_[now], wait));
      launch(stream, kPredict, l, parity, bucket);
      CHECK(cudaStreamWaitEvent(stream, attended_[now], wait));
      launch(stream, kGather, l, parity, bucket);
      CHECK(cudaEventRecordWithFlags(transferred_[now], stream, record));
    }
  }

  State* state_ = nullptr;
  cudaStream_t fg_ = nullptr, bg_[2] = {};
  cudaEvent_t forked_[2 * kLayers] = {}, attended_[2 * kLayers] = {},
                          transferred_[2 * kLayers] = {};
  cudaEvent_t ended_[2];
  cudaGraphExec_t fg_exec_[kBuckets][2], bg_exec_[kBuckets][2];
  int spin_ = 20000;
};

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 10000;
  const Harness::Scenario right[] = {
      {"graphs, no delay", 0},
      {"graphs, random delays", 20000},
      {"graphs, buckets change", 20000, true},
      {"graphs, every 7th step eager", 20000, true, 7},
      {"eager only", 5000, false, 1},
      {"graphs, launched far ahead", 20000, true, 7, false, false, true},
  };
  const Harness::Scenario wrong[] = {
      {"background launched first", 20000, false, 0, true},
      {"foreground does not wait", 0, false, 0, false, true},
  };
  bool good = true;
  for (const auto& c : right) {
    Harness h;  // a process's first steps each time: the events were never recorded
    const unsigned long long v = h.run(c, steps, 1);
    std::printf("%-34s steps=%d violations=%llu\n", c.name, steps, v);
    good = good && v == 0;
  }
  for (const auto& c : wrong) {
    Harness h;
    const unsigned long long v = h.run(c, steps / 10, 1);
    std::printf("%-34s steps=%d violations=%llu (must be caught)\n", c.name, steps / 10, v);
    good = good && v > 0;
  }
  std::printf(good ? "ok\n" : "FAILED\n");
  return good ? 0 : 1;
}
