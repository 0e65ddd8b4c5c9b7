// A range's pages are there, zero and in order when its chunks are reported; what the callbacks
// throw comes out, with no thread left behind.
#include "host/range.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace oasis;

namespace {

void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "host_range: %s\n", what.c_str());
  std::exit(1);
}

int64_t pages_there(char* data, int64_t bytes) {
  std::vector<unsigned char> there(bytes / sysconf(_SC_PAGESIZE));
  expect(mincore(data, bytes, there.data()) == 0, "mincore");
  int64_t pages = 0;
  for (unsigned char p : there) pages += p & 1;
  return pages;
}

int64_t pages_of(int64_t bytes) { return bytes / sysconf(_SC_PAGESIZE); }

// A sanitizer may keep a thread of its own.
int threads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    count += task.exists();
  return count;
}

void chunks_come_in_order_with_their_pages(int num_threads, int64_t bytes, int64_t chunk_bytes) {
  HostRange range(bytes);
  expect(reinterpret_cast<uintptr_t>(range.data()) % kHugePage == 0, "alignment");
  expect(range.bytes() >= bytes && range.bytes() < bytes + kHugePage, "size");
  expect(pages_there(range.data(), range.bytes()) == 0, "pages before they are asked for");
  PageWork work;
  work.num_threads = num_threads;
  work.chunk_bytes = chunk_bytes;
  char* next = range.data();
  work.on_chunk = [&](char* data, int64_t size) {
    expect(data == next, "a chunk out of order");
    expect(pages_there(data, size) == pages_of(size), "a chunk without its pages");
    next += size;
  };
  std::vector<int64_t> reported;
  work.progress = [&](int64_t done, int64_t total) {
    expect(total == range.bytes(), "total");
    expect(reported.empty() ? done == 0 : done >= reported.back(), "progress goes back");
    reported.push_back(done);
  };
  work_through(range.data(), range.bytes(), work);
  expect(next == range.data() + range.bytes(), "not all chunks");
  expect(reported.size() >= 2 && reported.back() == range.bytes(), "progress at the end");
  for (int64_t i = 0; i < range.bytes(); i += 4096 - 8) expect(range.data()[i] == 0, "not zero");
  range.data()[range.bytes() - 1] = 1;
}

// `when`: which call of that callback throws; the chunks are slow enough for all to be called.
void what_a_callback_throws_comes_out(const std::string& callback, int when) {
  HostRange range(24 * kHugePage);
  const int before = threads();
  PageWork work;
  work.num_threads = 3;
  work.chunk_bytes = 2 * kHugePage;
  work.period = std::chrono::milliseconds(2);
  int chunks = 0, reports = 0;
  std::atomic<int> pieces{0};
  auto count = [&](const std::string& name, int call) {
    if (name == callback && call == when) throw std::logic_error(name);
  };
  work.on_piece = [&](char* data, int64_t size) {
    make_pages(data, size);
    count("piece", ++pieces);
  };
  work.on_chunk = [&](char*, int64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    count("chunk", ++chunks);
  };
  work.progress = [&](int64_t done, int64_t total) {
    count("progress", ++reports);
    if (done == total) count("last progress", 1);
  };
  std::string thrown;
  try {
    work_through(range.data(), range.bytes(), work);
  } catch (const std::logic_error& error) {
    thrown = error.what();
  }
  expect(thrown == callback, "the exception of " + callback + " was lost");
  expect(threads() == before, callback + " left threads");
}

}  // namespace

int main() {
  for (int num_threads : {1, 4})
    for (int64_t bytes : {int64_t{1}, kHugePage, 37 * kHugePage - 5, 200 * kHugePage})
      for (int64_t chunk_bytes : {3 * kHugePage, 64 * kHugePage, int64_t{4} << 30})
        chunks_come_in_order_with_their_pages(num_threads, bytes, chunk_bytes);

  for (int when : {1, 7}) what_a_callback_throws_comes_out("piece", when);
  for (int when : {1, 12}) what_a_callback_throws_comes_out("chunk", when);
  for (int when : {1, 2, 5}) what_a_callback_throws_comes_out("progress", when);
  what_a_callback_throws_comes_out("last progress", 1);

  HostRange touched(5 * kHugePage);
  touch_pages(touched.data(), touched.bytes());
  expect(pages_there(touched.data(), touched.bytes()) == pages_of(touched.bytes()), "touch_pages");

  for (int node : {-1, 1023, 1024, 1 << 20})
    expect(!touched.prefer_node(node), "a node that is not there");
  bool refused = false;
  try {
    HostRange huge(int64_t{1} << 50);  // more than there are addresses
  } catch (const std::system_error&) {
    refused = true;
  }
  expect(refused, "a range beyond all addresses");
  expect(fill_seconds(9 * kHugePage, 2) > 0, "fill_seconds");
  std::printf("ok\n");
  return 0;
}
