#include "backend/cuda/upload_ring.h"

#include <cstring>

namespace oasis::cuda {

UploadRing::UploadRing(int64_t bytes, cudaStream_t stream)
    : part_bytes_((bytes + 255) / 256 * 256),
      stream_(stream),
      memory_(kParts * part_bytes_, "upload buffer") {}

char* UploadRing::reserve(int64_t bytes) {
  if (bytes > part_bytes_)
    throw std::logic_error("an upload of " + std::to_string(bytes) + " bytes, at most " +
                           std::to_string(part_bytes_) + " were planned for");
  if (used_ + bytes > part_bytes_) {
    passed_[part_].record(stream_);
    part_ = (part_ + 1) % kParts;
    passed_[part_].synchronize();
    used_ = 0;
  }
  return memory_.data() + part_ * part_bytes_ + used_;
}

void UploadRing::send(void* to, int64_t bytes) {
  const char* from = memory_.data() + part_ * part_bytes_ + used_;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
  used_ += (bytes + 15) / 16 * 16;
}

void UploadRing::upload(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(reserve(bytes), from, bytes);
  send(to, bytes);
}

}  // namespace oasis::cuda
