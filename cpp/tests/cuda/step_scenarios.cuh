// The scenarios of graph_events.cu: those that must pass, and faults that must be caught.
#pragma once

#include "step_order.cuh"

constexpr Spins kNoDelay{0, 0}, kEven{10000, 10000}, kShortForeground{2000, 8000};
constexpr Spins kSlowForeground{20000, 2000}, kSlowBackground{2000, 20000};
constexpr Spins kLongBackground{2000, 100000};  // far longer than any launch takes

enum Fault {
  kNone,
  kTransferNotAwaited,    // by the foreground
  kOneLayerAwaited,       // of four, by the foreground
  kTransferredTooEarly,   // is set before the gather
  kAttentionNotAwaited,   // by the gather
  kGathersUnordered,      // those of two steps
  kStatisticsNotAwaited,  // by the next step's predictions
  kForegroundNotAwaited,  // by the next step and its upload
  kUploadTooEarly,        // once the host has seen the foreground of t-2 end
  kBackgroundNotAwaited,  // by what touches whole requests
  kOneStreamAwaited,      // of two that transfer, by what touches whole requests
};

struct Scenario {
  const char* name;
  Spins spins;
  bool sizes = false;         // another one each step
  int eager_every = 0;        // every n-th step is eager, as prefill is
  int abort_every = 0;        // every n-th step breaks off, eager or while it is captured
  bool fill = false;          // the foreground's kernels fill the GPU
  bool ahead = false;         // the host waits for room to upload alone, not for tokens
  bool must_overlap = false;  // steps
  Fault fault = kNone;
};

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
    {.name = "every 9th step breaks off", .spins = kEven, .sizes = true, .abort_every = 9},
    {.name = "far ahead, steps break off",
     .spins = kSlowBackground,
     .sizes = true,
     .eager_every = 3,
     .abort_every = 10,
     .ahead = true},
    {.name = "foreground fills the GPU", .spins = kShortForeground, .sizes = true, .fill = true},
    {.name = "fills the GPU, far ahead, eager between",
     .spins = kShortForeground,
     .sizes = true,
     .eager_every = 5,
     .fill = true,
     .ahead = true},
};
constexpr Scenario faulty(const char* name, Spins spins, Fault fault) {
  return {.name = name, .spins = spins, .fault = fault};
}
constexpr Scenario kFaults[] = {
    faulty("foreground before the transfer", kLongBackground, kTransferNotAwaited),
    faulty("foreground after one layer of four", kLongBackground, kOneLayerAwaited),
    faulty("transferred before the gather", kLongBackground, kTransferredTooEarly),
    faulty("gather before attention", kSlowForeground, kAttentionNotAwaited),
    faulty("gathers not in the order of steps", kLongBackground, kGathersUnordered),
    faulty("prediction before the statistics", kLongBackground, kStatisticsNotAwaited),
    faulty("step before the foreground of the last", kEven, kForegroundNotAwaited),
    faulty("upload within the background", kLongBackground, kUploadTooEarly),
    faulty("admission within the background", kLongBackground, kBackgroundNotAwaited),
    faulty("admission after one of two transfers", kLongBackground, kOneStreamAwaited),
};
