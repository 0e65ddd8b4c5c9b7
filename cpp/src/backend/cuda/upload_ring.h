// Small uploads in the order of one stream, without waiting for the device: what is sent is copied
// into pinned memory first, which is used again once the stream is past it.
#pragma once

#include <array>

#include "backend/cuda/resources.h"

namespace oasis::cuda {

class UploadRing {
 public:
  // `bytes`: the most that one upload may have.
  UploadRing(int64_t bytes, cudaStream_t stream);

  void upload(void* to, const void* from, int64_t bytes);
  // Room to write an upload of `bytes` in place; then send() it.
  char* reserve(int64_t bytes);
  void send(void* to, int64_t bytes);

 private:
  static constexpr int kParts = 4;

  int64_t part_bytes_;
  cudaStream_t stream_;
  PinnedMemory memory_;
  std::array<Event, kParts> passed_;  // the stream is past all uploads from this part
  int part_ = 0;
  int64_t used_ = 0;  // of the part
};

}  // namespace oasis::cuda
