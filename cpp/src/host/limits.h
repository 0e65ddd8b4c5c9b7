// What of the machine this process may use. `root` is the folder that holds /proc and /sys: "/" but
// in tests.
#pragma once

#include <cstdint>
#include <string>

namespace oasis {

std::string gib(int64_t bytes);  // "1.5 GiB"

// Memory that may still be taken.
struct MemoryLeft {
  int64_t bytes;
  std::string why;     // what sets the bound, with its figures
  std::string remedy;  // what to do about it
};

// The least that the control groups of this process leave: the limit of each less what it holds
// beyond file pages, which the kernel gives up. A limit counts even where it exceeds the memory
// that the machine shows: that of a virtual machine may grow with use, up to the limit.
//
// Without a limit, MemAvailable. It is too low where memory grows with use, and nothing in the
// system says so: `assume_bytes` > 0 is the caller's word for how much the machine has in all. It
// stands in for MemTotal, never for a limit.
MemoryLeft memory_left(int64_t assume_bytes = 0, const std::string& root = "/");

// Cores that this process may run on, or its control groups' quota of them where that is lower.
int usable_cpus(const std::string& root = "/");

// Nodes that have memory; 1 where the system does not say.
int memory_nodes(const std::string& root = "/");

// The node of a PCI device such as "0000:1B:00.0"; -1 where the system does not say.
int node_of_pci_device(const std::string& bus_id, const std::string& root = "/");

// For errors of pinning `bytes`: that the limit of locked memory is below them and binds this
// process. Empty where it does not.
std::string locked_memory_note(int64_t bytes, const std::string& root = "/");

}  // namespace oasis
