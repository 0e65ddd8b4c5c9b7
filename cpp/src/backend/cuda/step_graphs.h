// Captured steps: for each size a graph a parity of steps.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "backend/cuda/resources.h"

namespace oasis::cuda {

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
  }

  explicit operator bool() const { return exec_ != nullptr; }
  void launch(cudaStream_t s) const { check(cudaGraphLaunch(exec_, s), "graph launch"); }

  static void begin_capture(cudaStream_t s) {
    check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "capture");
  }
  // False: there is no memory for it.
  bool end_capture(cudaStream_t s) {
    cudaGraph_t graph;
    check(cudaStreamEndCapture(s, &graph), "capture");
    // Streams' priorities are not kept: with them the launch took twice as long, for no faster
    // step.
    const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      exec_ = nullptr;
      return false;
    }
    check(error, "graph instantiation");
    return true;
  }
  static void cancel_capture(cudaStream_t s) {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(s, &graph);  // fails, as what it holds is not whole
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// What a captured step was captured for; it serves any step that needs no more. Few sizes, so that
// a service has captured all that it meets after some minutes: rows follow from the requests.
struct StepSize {
  int requests = 0;
  int rows_each = 0, logits_each = 0;  // on average, rounded up
  int score_blocks = 0;                // of the longest request that predicts; 0: none does
  int variant = 0;                     // of the caller's part
  auto operator<=>(const StepSize&) const = default;
};

struct StepGraphs {
  int64_t used = 0;      // the last step of its size
  bool warmed = false;   // has run eagerly: libraries have chosen their algorithms, code is loaded
  bool refused = false;  // there was no memory for it: it stays eager
  std::array<Graph, 2> step;  // by parity
};

// The size to capture for: few sizes, little padding.
inline int request_bucket(int requests) {
  int step = 1;
  while (8 * step < requests) step *= 2;
  return (requests + step - 1) / step * step;
}
inline int block_bucket(int blocks) {
  int step = 128;
  while (8 * step < blocks) step *= 2;
  return std::max(512, (blocks + step - 1) / step * step);
}

}  // namespace oasis::cuda
