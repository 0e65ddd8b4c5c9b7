#include "backend/cuda/host_memory.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <system_error>

#include "host/limits.h"
#include "ops/cuda/check.h"

namespace oasis::cuda {
namespace {

constexpr int64_t kMaxChunk = int64_t{64} << 30;

// An error's text: the field and its value, what happened, what the machine has, what to do.
std::string failure(const HostMemory::Options& o, const std::string& what,
                    const std::string& remedy) {
  const MemoryLeft left = memory_left(o.assume_bytes, o.root);
  char value[64];
  std::snprintf(value, sizeof value,
                "host_kv_gib = %g: ", static_cast<double>(o.bytes) / (int64_t{1} << 30));
  return value + what + "; this machine has " + gib(left.bytes) + " left (" + left.why + "); " +
         (remedy.empty() ? left.remedy : remedy);
}

struct PinFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Before anything is taken: the kernel ends a process that takes too much, rather than refuse it.
int64_t checked_bytes(const HostMemory::Options& o) {
  if (o.bytes < 1) refuse("bytes", o.bytes, "at least 1");
  if (o.chunk_bytes < kHugePage || o.chunk_bytes > kMaxChunk || o.chunk_bytes % kHugePage)
    refuse("chunk_bytes", o.chunk_bytes, "a multiple of 2 MiB, at most 64 GiB");
  if (o.num_threads < 0) refuse("num_threads", o.num_threads, "at least 1, or 0 for all cores");
  if (o.assume_bytes < 0) refuse("assume_bytes", o.assume_bytes, "at least 1, or 0 for unknown");
  if (o.bytes > memory_left(o.assume_bytes, o.root).bytes)
    throw std::runtime_error(failure(o, "too much", ""));
  return o.bytes;
}

int current_device() {
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaFree(nullptr), "CUDA does not start");  // now, not while we are timed
  int same_address;
  check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
        "cudaDeviceGetAttribute");
  if (!same_address)
    throw std::runtime_error("this GPU cannot use pinned memory at the host's address");
  return device;
}

}  // namespace

HostMemory::Registrations::~Registrations() {
  // What fails here has nobody to be told: CUDA is going, or an earlier kernel has failed.
  for (char* chunk : chunks_) cudaHostUnregister(chunk);
}

void HostMemory::Registrations::add(char* data, int64_t bytes) {
  chunks_.reserve(chunks_.size() + 1);
  const cudaError_t error =
      cudaHostRegister(data, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaSuccess) {
    chunks_.push_back(data);
    return;
  }
  cudaGetLastError();  // not the next call's
  throw PinFailure(cudaGetErrorString(error));
}

HostMemory::HostMemory(const Options& options) : HostMemory(options, current_device()) {}

HostMemory::HostMemory(const Options& options, int device) try
    : bytes_(checked_bytes(options)), chunk_bytes_(options.chunk_bytes), range_(options.bytes) {
  const auto begin = std::chrono::steady_clock::now();
  place(options, device);
  PageWork work;
  work.num_threads = options.num_threads ? options.num_threads : usable_cpus(options.root);
  work.chunk_bytes = chunk_bytes_;
  work.progress = options.progress;
  work.on_chunk = [&](char* data, int64_t bytes) {
    check(cudaSetDevice(device), "cudaSetDevice");  // a thread begins with the first one
    registrations_.add(data, bytes);
  };
  work_through(range_.data(), range_.bytes(), work);
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
} catch (const PinFailure& error) {  // here and below the memory has been given back
  const std::string note = locked_memory_note(options.bytes, options.root);
  throw std::runtime_error(failure(options, std::string("CUDA cannot pin it: ") + error.what(),
                                   note.empty() ? "lower it" : "lower it; " + note));
} catch (const std::system_error& error) {  // of mmap, of making pages, or of a thread
  throw std::runtime_error(failure(
      options, error.what(), "lower it, or raise what limits this process (ulimit -v, ulimit -u)"));
}

void HostMemory::place(const Options& options, int device) {
  if (options.numa_node < -1) refuse("numa_node", options.numa_node, "a node, or -1 for the GPU's");
  int node = options.numa_node;
  if (node == -1) {
    if (memory_nodes(options.root) == 1) return;
    char bus_id[32];
    check(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "cudaDeviceGetPCIBusId");
    node = node_of_pci_device(bus_id, options.root);
    if (node == -1) return;
  }
  if (range_.prefer_node(node))
    numa_node_ = node;
  else if (options.numa_node != -1)  // asked for by name; what was only found is no reason to fail
    refuse("numa_node", node, "a node of this machine that this process may allocate on");
}

}  // namespace oasis::cuda
