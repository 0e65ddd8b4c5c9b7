// The host tier's memory: pinned, and mapped at the same address on the device.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host/range.h"

namespace oasis::cuda {

// One contiguous range of addresses in registrations of `chunk_bytes` each. A kernel may read and
// write across their borders, a cudaMemcpy may not: it must stay within a multiple of chunk_bytes.
//
// Of the current device, which must not use the memory any more when it goes.
class HostMemory {
 public:
  struct Options {
    int64_t bytes = 0;
    int numa_node = -1;                      // -1: the device's
    int num_threads = 0;                     // 0: the cores this process may use
    int64_t chunk_bytes = int64_t{4} << 30;  // a multiple of 2 MiB, at most 64 GiB
    int64_t assume_bytes = 0;                // memory_left()'s
    std::string root = "/";                  // of /proc and /sys
    // As PageWork's, `done` being ready for use; called by the constructing thread. What it throws
    // ends the construction: nothing is left of it.
    std::function<void(int64_t done, int64_t total)> progress;
  };

  // Throws std::invalid_argument for an option out of range, std::runtime_error naming host_kv_gib,
  // what the machine has and what to do for memory that cannot be had.
  explicit HostMemory(const Options& options);

  char* data() const { return range_.data(); }
  int64_t bytes() const { return bytes_; }
  int64_t chunk_bytes() const { return chunk_bytes_; }
  int numa_node() const { return numa_node_; }  // that it prefers; -1: none
  double seconds() const { return seconds_; }  // that the construction took, after CUDA's own start

 private:
  // Unregisters what it holds.
  class Registrations {
   public:
    ~Registrations();
    void add(char* data, int64_t bytes);

   private:
    std::vector<char*> chunks_;
  };

  HostMemory(const Options& options, int device);
  void place(const Options& options, int device);

  const int64_t bytes_, chunk_bytes_;
  HostRange range_;
  Registrations registrations_;  // after range_: they go first
  int numa_node_ = -1;
  double seconds_ = 0;
};

}  // namespace oasis::cuda
