// Owners of what CUDA hands out.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "ops/cuda/check.h"

namespace oasis::cuda {

// Device memory, not initialised.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(int64_t bytes, const char* what) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes), what);
  }
  DeviceMemory(DeviceMemory&& o) noexcept : data_(std::exchange(o.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    std::swap(data_, o.data_);
    return *this;
  }
  ~DeviceMemory() { cudaFree(data_); }

  char* data() const { return static_cast<char*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Pinned host memory that the device sees at the same address.
class PinnedMemory {
 public:
  PinnedMemory(int64_t bytes, const char* what) {
    check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped), what);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() { cudaFreeHost(data_); }

  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

enum class Priority { kLow, kMiddle, kHigh };  // of a stream's waiting CTAs for SMs

class Stream {
 public:
  explicit Stream(Priority priority) {
    int least, greatest;  // greater is lower
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream");
    const int value = priority == Priority::kLow      ? least
                      : priority == Priority::kMiddle ? (least + greatest) / 2
                                                      : greatest;
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, value), "stream");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_), "background or step failed"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"); }
  Event(Event&& o) noexcept : event_(std::exchange(o.event_, nullptr)) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }

  void synchronize() const { check(cudaEventSynchronize(event_), "background or step failed"); }
  // Under capture into a graph an external event keeps its meaning outside of it.
  void record(cudaStream_t s, bool external = false) const {
    check(cudaEventRecordWithFlags(event_, s,
                                   external ? cudaEventRecordExternal : cudaEventRecordDefault),
          "event record");
  }
  void hold(cudaStream_t s, bool external = false) const {
    check(cudaStreamWaitEvent(s, event_, external ? cudaEventWaitExternal : cudaEventWaitDefault),
          "event wait");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace oasis::cuda
