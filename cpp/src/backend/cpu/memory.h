// Zeroed, page-aligned memory that costs nothing until it is touched.
#pragma once

#include <sys/mman.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace oasis::cpu {

class Memory {
 public:
  Memory(int64_t floats, const char* what) : bytes_(floats * sizeof(float)) {
    if (bytes_ == 0) return;
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      throw std::runtime_error(std::string("cannot map ") + std::to_string(bytes_) +
                               " bytes for the " + what);
    madvise(p, bytes_, MADV_HUGEPAGE);  // advice: without huge pages the pool is only slower
    data_ = static_cast<float*>(p);
  }
  Memory(Memory&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (data_) munmap(data_, bytes_);
  }

  float* data() const { return data_; }

 private:
  float* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace oasis::cpu
