// The kernels of graph_events.cu: each stage of a decode step is one that spins and checks. What
// they check they alone write: of each stage and layer the last step in which it was done.
#pragma once

#include <cuda_runtime.h>

constexpr int kLayers = 12, kRingParts = 4;

enum Stage { kAppend, kAttend, kPredict, kGather, kSample, kStages };

struct Spins {  // the most cycles, but for a few kernels that spin four times as long
  int foreground, background;
};

struct Metadata {
  long long step;
  unsigned seed;
  Spins spins;
};

struct State {  // on the device
  Metadata metadata[2];
  long long done[kStages][kLayers];  // the last step whose stage is done there; kSample: layer 0
  long long predictions;             // so far: what the statistics count
  unsigned long long violations;
  unsigned long long overlaps;  // foreground kernels that began within the background of t-1
};

struct Pinned {
  Metadata ring[kRingParts];
  long long tokens[2], counted[2];  // by parity: the step that sampled; its statistics
};

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
inline __device__ bool holds(const State& s, const Pinned& p, Stage stage, int l, long long t) {
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
             (l > 0 ? done(kGather, l - 1) == t : done(kGather, last) == t - 1);
    default:
      return done(kAttend, last) == t;
  }
}

inline __device__ void spin(unsigned hash, int most) {
  hash = (hash ^ (hash >> 15)) * 2246822519u;
  hash ^= hash >> 13;
  long long cycles = most > 0 ? hash % most : 0;
  if ((hash >> 20) % 16 == 0) cycles *= 4;
  for (const long long begin = clock64(); clock64() - begin < cycles;) {
  }
}

// Larger sizes have more blocks, of which the first one checks.
static __global__ void run_stage(State* s, Pinned* p, Stage stage, int layer, int parity) {
  const Metadata& m = s->metadata[parity];
  const long long t = load(m.step);
  const bool foreground = stage != kPredict && stage != kGather, first = blockIdx.x == 0;
  if (first && foreground && load(s->done[kGather][kLayers - 1]) < t - 1)
    atomicAdd(&s->overlaps, 1ull);
  bool ok = (t & 1) == parity && (!first || holds(*s, *p, stage, layer, t));
  spin((load(m.seed) + 131u * layer + 7919u * stage + blockIdx.x) * 2654435761u,
       foreground ? load(m.spins.foreground) : load(m.spins.background));
  ok = ok && load(m.step) == t && (!first || holds(*s, *p, stage, layer, t));
  if (!ok) atomicAdd(&s->violations, 1ull);
  if (!first) return;
  if (stage == kPredict) store(s->predictions, load(s->predictions) + 1);
  if (stage == kSample) store(p->tokens[parity], t);
  __threadfence_system();
  store(s->done[stage][layer], t);
}

// What touches whole requests, before step t.
static __global__ void admit(State* s, long long t) {
  for (int i = 0; i < kStages * kLayers; ++i) {
    const int stage = i / kLayers, layer = i % kLayers;
    if (stage == kSample && layer > 0) continue;
    if (load(s->done[stage][layer]) != t - 1) atomicAdd(&s->violations, 1ull);
  }
}
