#include "host/limits.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace oasis {
namespace {

constexpr int64_t kUnlimited = int64_t{1} << 60;  // an unset limit of version 1 reads as more
constexpr int kCapIpcLock = 14;

std::optional<int64_t> number(const std::string& text) {
  int64_t value;
  std::istringstream in(text);
  if (in >> value) return value;
  return std::nullopt;
}

// nullopt: the file is not there, or holds something else, such as "max".
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  return number(line);
}

// The number after `key` at the start of a line.
std::optional<int64_t> field_in(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.compare(0, key.size(), key) == 0) return number(line.substr(key.size()));
  return std::nullopt;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

bool contains(const std::vector<std::string>& parts, const std::string& part) {
  return std::find(parts.begin(), parts.end(), part) != parts.end();
}

std::string under(const std::string& root, const std::string& path) {
  return (root == "/" ? "" : root) + path;
}

// This process's group, as /proc/self/cgroup has it: of version 2, or of a controller's version 1.
std::optional<std::string> group_of(const std::string& controller, bool v2,
                                    const std::string& root) {
  std::ifstream in(under(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(in, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? controllers.empty() : contains(split(controllers, ','), controller))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

// `path` seen from a mount of the group `mounted`; empty: that group itself. A container may see
// its own group as the root of the hierarchy, under a path that is the host's.
std::string below_mount(std::string path, const std::string& mounted) {
  if (mounted != "/") {
    const bool inside = path.compare(0, mounted.size(), mounted) == 0 &&
                        (path.size() == mounted.size() || path[mounted.size()] == '/');
    path = inside ? path.substr(mounted.size()) : "";
  }
  return path == "/" || path.find("/..") != std::string::npos ? "" : path;
}

struct ControlGroup {
  std::string folder, name;
  bool v2;
};

// The groups that bound this process for a controller: its own and those above, as far as they are
// to be seen from here.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream mounts(under(root, "/proc/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {
    // id parent device root mount-point options [more ...] - type source options
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> place = split(line.substr(0, dash), ' '),
                                   kind = split(line.substr(dash + 3), ' ');
    if (place.size() < 5 || kind.size() < 3) continue;
    const bool v2 = kind[0] == "cgroup2";
    if (!v2 && (kind[0] != "cgroup" || !contains(split(kind[2], ','), controller))) continue;
    const std::optional<std::string> path = group_of(controller, v2, root);
    if (!path) continue;
    std::string name = below_mount(*path, place[3]);
    for (;;) {
      groups.push_back({under(root, place[4]) + name, name.empty() ? "/" : name, v2});
      if (name.empty()) break;
      name.resize(name.rfind('/'));
    }
  }
  return groups;
}

// What the group holds and the kernel would not give up.
int64_t held_bytes(const ControlGroup& group) {
  const std::string stat = group.folder + "/memory.stat", total = group.v2 ? "" : "total_";
  const int64_t all =
      number_in(group.folder + (group.v2 ? "/memory.current" : "/memory.usage_in_bytes"))
          .value_or(0);
  const int64_t files = field_in(stat, total + "inactive_file ").value_or(0) +
                        field_in(stat, total + "active_file ").value_or(0);
  return std::max<int64_t>(0, all - files);
}

// Memory that is switched on, whether or not MemTotal counts it; 0 where the system does not say.
int64_t online_bytes(const std::string& root) {
  const std::string folder = under(root, "/sys/devices/system/memory");
  std::ifstream in(folder + "/block_size_bytes");
  int64_t block = 0, blocks = 0;
  in >> std::hex >> block;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    blocks += number_in(entry.path() / "online").value_or(0) == 1;
  return block * blocks;
}

MemoryLeft machine_left(int64_t assume_bytes, const std::string& root) {
  const std::string path = under(root, "/proc/meminfo");
  const int64_t total = field_in(path, "MemTotal:").value_or(0) * 1024,
                available = field_in(path, "MemAvailable:").value_or(0) * 1024;
  if (assume_bytes > 0) {
    const int64_t used = std::max<int64_t>(0, total - available);
    return {std::max<int64_t>(0, assume_bytes - used),
            "host_memory_gib says " + gib(assume_bytes) + ", of which " + gib(used) + " are in use",
            "lower it, or correct host_memory_gib"};
  }
  std::string why = "no control group has a limit, and MemAvailable is " + gib(available);
  const int64_t online = online_bytes(root);
  if (online > total + total / 16) why += " while " + gib(online) + " are online";
  return {available, why,
          "lower it, or, where memory grows with use, say how much the machine has: "
          "host_memory_gib"};
}

}  // namespace

std::string gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", static_cast<double>(bytes) / (int64_t{1} << 30));
  return text;
}

MemoryLeft memory_left(int64_t assume_bytes, const std::string& root) {
  MemoryLeft least{std::numeric_limits<int64_t>::max(), "", ""};
  for (const ControlGroup& group : control_groups("memory", root)) {
    // Beyond memory.high the kernel slows a process down until it hardly moves.
    const std::vector<std::string> files =
        group.v2 ? std::vector<std::string>{"/memory.max", "/memory.high"}
                 : std::vector<std::string>{"/memory.limit_in_bytes"};
    for (const std::string& file : files) {
      const int64_t limit = number_in(group.folder + file).value_or(kUnlimited);
      if (limit >= kUnlimited) continue;
      const int64_t held = held_bytes(group), left = std::max<int64_t>(0, limit - held);
      if (left < least.bytes)
        least = {left,
                 "control group " + group.name + ": " + file.substr(1) + " is " + gib(limit) +
                     ", " + gib(held) + " in use",
                 "lower it, or raise the group's limit"};
    }
  }
  if (assume_bytes > 0 || least.why.empty()) {
    const MemoryLeft machine = machine_left(assume_bytes, root);
    if (machine.bytes < least.bytes) least = machine;
  }
  return least;
}

int usable_cpus(const std::string& root) {
  // More cores than cpu_set_t has bits: the call fails, and a set of that size will have to do.
  cpu_set_t set;
  int64_t cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : CPU_SETSIZE;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    std::optional<int64_t> quota, period;
    if (group.v2) {
      std::ifstream in(group.folder + "/cpu.max");  // "quota period" or "max period"
      std::string first, second;
      in >> first >> second;
      quota = number(first), period = number(second);
    } else {
      quota = number_in(group.folder + "/cpu.cfs_quota_us");  // -1: none
      period = number_in(group.folder + "/cpu.cfs_period_us");
    }
    if (quota.value_or(-1) > 0 && period.value_or(0) > 0)
      cpus = std::min(cpus, std::max<int64_t>(1, *quota / *period));
  }
  return static_cast<int>(cpus);
}

int memory_nodes(const std::string& root) {
  std::ifstream in(under(root, "/sys/devices/system/node/has_memory"));
  std::string line;
  std::getline(in, line);
  int nodes = 0;
  for (const std::string& run : split(line, ',')) {  // "0-1,4"
    const std::vector<std::string> ends = split(run, '-');
    if (ends.empty()) continue;
    const std::optional<int64_t> first = number(ends.front()), last = number(ends.back());
    if (first && last) nodes += static_cast<int>(*last - *first + 1);
  }
  return std::max(1, nodes);
}

int node_of_pci_device(const std::string& bus_id, const std::string& root) {
  std::string name = bus_id;  // CUDA writes it in capitals, sysfs does not
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return static_cast<int>(
      number_in(under(root, "/sys/bus/pci/devices/" + name + "/numa_node")).value_or(-1));
}

std::string locked_memory_note(int64_t bytes, const std::string& root) {
  std::ifstream status(under(root, "/proc/self/status"));
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, 7, "CapEff:") == 0) {
      uint64_t effective = 0;
      std::istringstream in(line.substr(7));
      in >> std::hex >> effective;
      if (effective >> kCapIpcLock & 1) return "";
    }
  // "unlimited" is no number.
  const std::optional<int64_t> limit =
      field_in(under(root, "/proc/self/limits"), "Max locked memory");
  if (!limit || *limit >= bytes) return "";
  // NVIDIA's driver for Linux pins without counting against the limit; others may count.
  return "the limit of locked memory is " + std::to_string(*limit >> 10) +
         " KiB and this process has no CAP_IPC_LOCK: where the driver honours that, raise it "
         "(ulimit -l, LimitMEMLOCK)";
}

}  // namespace oasis
