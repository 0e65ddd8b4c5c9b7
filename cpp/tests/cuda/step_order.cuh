// The kernels of graph_events.cu: each stage of a decode step is one that spins and checks. What
// they check they alone write: of each stage and layer the last step in which it was done, and
// what each block of a gather fetched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/flags.cuh"

constexpr int kLayers = 13, kRingParts = 4;   // the last flags waited for are not a full group
constexpr int kGathers = 2, kHeldLayers = 4;  // as LayerKernels has them
constexpr int kMostBlocks = 3, kWords = 32;   // of a gather; what each block of it fetches

enum Stage { kAppend, kAttend, kPredict, kGather, kSample, kStages };

struct Spins {  // the most cycles, but for a few kernels that spin four times as long
  int foreground, background;
};

struct Metadata {
  int64_t step;
  unsigned seed;
  Spins spins;
  int fetched_before;  // blocks of each gather of the step before; 0: nothing is known of it
};

struct State {  // on the device
  Metadata metadata[2];
  int64_t transferred[kLayers];  // the flags
  int32_t arrivals[kLayers];
  int64_t done[kStages][kLayers];  // the last step whose stage is done there; kSample: layer 0
  int64_t predictions;             // so far: what the statistics count
  unsigned long long violations;
  unsigned long long overlaps;  // foreground kernels that began within the background of t-1
  alignas(128) int64_t fetched[kLayers][kMostBlocks][kWords];  // the step
};

struct Pinned {
  Metadata ring[kRingParts];
  int64_t tokens[2], counted[2];  // by parity: the step that sampled; its statistics
  int64_t let_go[kLayers];        // flags that no one waits for
};

// The last layer of the transfer stream that `layer` is on.
__host__ __device__ constexpr int last_beside(int layer) {
  return kLayers - 1 - (kLayers - 1 - layer) % kGathers;
}

// ------------------------------------------------------------ kernels: one thread each

template <class T>
__device__ T load(const T& x) {
  return *const_cast<const volatile T*>(&x);
}

template <class T>
__device__ void store(T& x, T value) {
  *const_cast<volatile T*>(&x) = value;
}

// What must be so as long as this stage of layer l runs in step t.
inline __device__ bool holds(const State& s, const Pinned& p, Stage stage, int l, int64_t t) {
  constexpr int last = kLayers - 1;
  const int parity = t & 1;
  auto done = [&](Stage of, int layer) { return load(s.done[of][layer]); };
  if (load(s.metadata[parity].step) != t || done(stage, l) != t - 1) return false;
  switch (stage) {
    case kAppend:
      return done(kPredict, l) == t - 1 && done(kGather, l) == t - 1 &&
             (l > 0 ? done(kAttend, l - 1) == t : done(kSample, 0) == t - 1);
    case kAttend:
      return done(kAppend, l) == t && done(kGather, l) == t - 1;
    case kPredict:
      return done(kAppend, l) == t && done(kGather, l) == t - 1 &&
             (l > 0 ? done(kPredict, l - 1) == t
                    : done(kPredict, last) == t - 1 &&
                          load(p.counted[parity ^ 1]) == (t - 1) * kLayers);
    case kGather:
      return done(kAppend, l) == t && done(kAttend, l) == t && done(kPredict, l) == t &&
             (l >= kGathers ? done(kGather, l - kGathers) == t
                            : done(kGather, last_beside(l)) == t - 1);
    default:
      return done(kAttend, last) == t;
  }
}

// All that the gather of step t - 1 fetched is there, by plain loads.
inline __device__ bool fetched(const State& s, int l, int64_t t, int blocks) {
  bool all = true;
  for (int b = 0; b < blocks; ++b)
    for (int i = 0; i < kWords; ++i) all = all && s.fetched[l][b][i] == t - 1;
  return all;
}

// As the gather stores, with its end.
inline __device__ void fetch(int64_t* to, int64_t value) {
  __shared__ alignas(128) int64_t from[kWords];
  for (int64_t& word : from) word = value;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))),
               "r"(static_cast<uint32_t>(sizeof from))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

inline __device__ void spin(unsigned hash, int most) {
  hash = (hash ^ (hash >> 15)) * 2246822519u;
  hash ^= hash >> 13;
  long long cycles = most > 0 ? hash % most : 0;
  if ((hash >> 20) % 16 == 0) cycles *= 4;
  for (const long long begin = clock64(); clock64() - begin < cycles;) {
  }
}

// Of several blocks each has its part of a gather; of other stages the first one checks all.
static __global__ void run_stage(State* s, Pinned* p, Stage stage, int layer, int parity,
                                 oasis::cuda::DoneFlag flag) {
  const Metadata& m = s->metadata[parity];
  const int64_t t = load(m.step);
  const bool foreground = stage != kPredict && stage != kGather, first = blockIdx.x == 0;
  if (first && foreground)
    for (int l = kLayers - kGathers; l < kLayers; ++l)
      if (load(s->done[kGather][l]) < t - 1) {
        atomicAdd(&s->overlaps, 1ull);
        break;
      }
  bool ok = (t & 1) == parity && (!first || holds(*s, *p, stage, layer, t));
  if (stage == kAppend || stage == kAttend)
    ok = ok && fetched(*s, layer, t, load(m.fetched_before));
  spin((load(m.seed) + 131u * layer + 7919u * stage + blockIdx.x) * 2654435761u,
       foreground ? load(m.spins.foreground) : load(m.spins.background));
  ok = ok && load(m.step) == t && (!first || holds(*s, *p, stage, layer, t));
  if (!ok) atomicAdd(&s->violations, 1ull);
  if (first) {
    if (stage == kPredict) store(s->predictions, load(s->predictions) + 1);
    if (stage == kSample) store(p->tokens[parity], t);
    __threadfence_system();
    store(s->done[stage][layer], t);
  }
  if (stage != kGather) return;
  fetch(s->fetched[layer][blockIdx.x], t);
  oasis::cuda::arrive(flag);
}

// What touches whole requests, before step t.
static __global__ void admit(State* s, int64_t t) {
  for (int i = 0; i < kStages * kLayers; ++i) {
    const int stage = i / kLayers, layer = i % kLayers;
    if (stage == kSample && layer > 0) continue;
    if (load(s->done[stage][layer]) != t - 1) atomicAdd(&s->violations, 1ull);
  }
}

// Step t, of which only a part ran, counts as done.
static __global__ void forget(State* s, Pinned* p, int64_t t) {
  for (int i = 0; i < kStages * kLayers; ++i)
    if (i / kLayers != kSample || i % kLayers == 0) store(s->done[i / kLayers][i % kLayers], t);
  store(s->predictions, t * kLayers);
  store(p->counted[t & 1], t * kLayers);
}
