// A large range of memory whose pages are made by several threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

namespace oasis {

inline constexpr int64_t kHugePage = int64_t{2} << 20;

// Contiguous zeroed memory, from a multiple of a huge page on and rounded up to one, in huge pages
// where the kernel has them. It has no pages until they are touched. A forked child does not have
// the range, and core dumps leave it out.
class HostRange {
 public:
  explicit HostRange(int64_t bytes);  // throws std::system_error
  ~HostRange();
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  // Pages made from here on come from that memory node while it has any, then from others. False
  // where the kernel refuses: a sandbox may forbid it.
  bool prefer_node(int node);

 private:
  int64_t bytes_;
  char* data_;
};

// Gives a part of a fresh range its pages. Throws std::system_error.
void make_pages(char* data, int64_t bytes);
// What make_pages does where the kernel cannot do it at once (before Linux 5.14).
void touch_pages(char* data, int64_t bytes);

struct PageWork {
  int num_threads = 1;
  int64_t chunk_bytes = int64_t{4} << 30;
  // Called by `num_threads` threads, each for small parts of the range.
  std::function<void(char* data, int64_t bytes)> on_piece = make_pages;
  // Called by one further thread for each chunk whose pieces are done, in order, while those of the
  // next chunks go on.
  std::function<void(char* data, int64_t bytes)> on_chunk;
  // Called by the calling thread at the start, about once a `period` and at the end, with the bytes
  // of the chunks that are done.
  std::function<void(int64_t done, int64_t total)> progress;
  std::chrono::milliseconds period{1000};
};

// Goes through [data, data + bytes). What any of the functions throws stops all threads, once their
// current call has returned, and is thrown from here.
void work_through(char* data, int64_t bytes, const PageWork& work);

// Seconds that `num_threads` threads need to fill fresh memory of that size with ones. `progress`
// as in PageWork.
double fill_seconds(int64_t bytes, int num_threads,
                    std::function<void(int64_t done, int64_t total)> progress = {});

}  // namespace oasis
