#include "host/range.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

// Of Linux 5.14; the system's headers may be older than its kernel.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace oasis {
namespace {

constexpr int64_t kPiece = 32 * kHugePage;  // some 20 ms of one thread: what an interrupt waits for
constexpr int kMpolPreferred = 1;           // <numaif.h> belongs to libnuma
constexpr int kMaxNodes = 1024;

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

// The threads of one work_through().
class Work {
 public:
  Work(char* data, int64_t bytes, const PageWork& work)
      : data_(data),
        bytes_(bytes),
        work_(work),
        chunks_((bytes + work.chunk_bytes - 1) / work.chunk_bytes),
        pieces_left_(chunks_) {
    for (int64_t c = 0; c < chunks_; ++c) pieces_left_[c] = pieces_in(c);
  }

  void run() {
    if (work_.progress) work_.progress(0, bytes_);
    try {
      threads_.emplace_back([this] { guarded([this] { finish_chunks(); }); });
      for (int t = 0; t < work_.num_threads; ++t)
        threads_.emplace_back([this] { guarded([this] { work_on_pieces(); }); });
      report();
    } catch (...) {
      stop_with(std::current_exception());
    }
    for (std::thread& thread : threads_) thread.join();
    if (error_) std::rethrow_exception(error_);
    if (work_.progress) work_.progress(bytes_, bytes_);
  }

 private:
  int64_t chunk_bytes(int64_t chunk) const {
    return std::min(work_.chunk_bytes, bytes_ - chunk * work_.chunk_bytes);
  }
  int64_t pieces_in(int64_t chunk) const { return (chunk_bytes(chunk) + kPiece - 1) / kPiece; }

  template <class F>
  void guarded(F&& body) {
    try {
      body();
    } catch (...) {
      stop_with(std::current_exception());
    }
  }

  void stop_with(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::move(error);
    }
    changed_.notify_all();
  }

  // The next piece in the order of addresses; false: there is none, or all stop.
  bool take(int64_t& chunk, int64_t& piece) {
    std::lock_guard lock(mutex_);
    if (error_ || next_chunk_ == chunks_) return false;
    chunk = next_chunk_, piece = next_piece_++;
    if (next_piece_ == pieces_in(chunk)) ++next_chunk_, next_piece_ = 0;
    return true;
  }

  void work_on_pieces() {
    for (int64_t chunk, piece; take(chunk, piece);) {
      const int64_t begin = piece * kPiece, bytes = std::min(kPiece, chunk_bytes(chunk) - begin);
      work_.on_piece(data_ + chunk * work_.chunk_bytes + begin, bytes);
      bool last;
      {
        std::lock_guard lock(mutex_);
        last = --pieces_left_[chunk] == 0;
      }
      if (last) changed_.notify_all();
    }
  }

  void finish_chunks() {
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return error_ || pieces_left_[chunk] == 0; });
        if (error_) return;
      }
      if (work_.on_chunk) work_.on_chunk(data_ + chunk * work_.chunk_bytes, chunk_bytes(chunk));
      {
        std::lock_guard lock(mutex_);
        ++chunks_done_;
      }
      changed_.notify_all();
    }
  }

  void report() {
    std::unique_lock lock(mutex_);
    while (
        !changed_.wait_for(lock, work_.period, [&] { return error_ || chunks_done_ == chunks_; })) {
      const int64_t done = chunks_done_ * work_.chunk_bytes;
      lock.unlock();  // the callback may take its time, and throw
      if (work_.progress) work_.progress(done, bytes_);
      lock.lock();
    }
  }

  char* const data_;
  const int64_t bytes_;
  const PageWork& work_;
  const int64_t chunks_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<int64_t> pieces_left_;  // of each chunk
  int64_t next_chunk_ = 0, next_piece_ = 0, chunks_done_ = 0;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace

HostRange::HostRange(int64_t bytes) : bytes_(round_up(bytes, kHugePage)) {
  // Not reserved: the kernel's guess at what may be promised knows nothing of memory that grows.
  const size_t room = bytes_ + kHugePage;
  void* const p = mmap(nullptr, room, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  char* const begin = static_cast<char*>(p);
  data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(begin), kHugePage));
  if (data_ > begin) munmap(begin, data_ - begin);
  if (data_ < begin + kHugePage) munmap(data_ + bytes_, begin + kHugePage - data_);
  madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: without huge pages it is only slower
  // A child would get copies of pages that a device uses, or take them from their owner by
  // copy-on-write.
  madvise(data_, bytes_, MADV_DONTFORK);
  madvise(data_, bytes_, MADV_DONTDUMP);
}

HostRange::~HostRange() { munmap(data_, bytes_); }

bool HostRange::prefer_node(int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  if (node < 0 || node >= kMaxNodes) return false;
  unsigned long mask[kMaxNodes / kBits] = {};
  mask[node / kBits] |= 1ul << node % kBits;
  return syscall(SYS_mbind, data_, bytes_, kMpolPreferred, mask, kMaxNodes + 1, 0) == 0;
}

void touch_pages(char* data, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  volatile char* const p = data;
  // No read first: that would map the shared page of zeros, for the write to replace.
  for (int64_t i = 0; i < bytes; i += page) p[i] = 0;
}

void make_pages(char* data, int64_t bytes) {
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw std::system_error(errno, std::generic_category(), "making pages");
  touch_pages(data, bytes);
}

void work_through(char* data, int64_t bytes, const PageWork& work) {
  Work(data, bytes, work).run();
}

double fill_seconds(int64_t bytes, int num_threads,
                    std::function<void(int64_t, int64_t)> progress) {
  const auto begin = std::chrono::steady_clock::now();
  const HostRange range(bytes);
  PageWork work;
  work.num_threads = num_threads;
  work.progress = std::move(progress);
  work.on_piece = [](char* data, int64_t piece) { std::memset(data, 1, piece); };
  work_through(range.data(), range.bytes(), work);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace oasis
