#include "kv/host_pool.h"

#include <algorithm>
#include <utility>

namespace oasis {

int64_t HostPool::free_count_beside(const std::vector<Handle>& blocks) const {
  const auto unused =
      std::count_if(blocks.begin(), blocks.end(), [](Handle b) { return b->users == 0; });
  return free_count() - unused_units(unused);
}

void HostPool::take(int64_t count, std::vector<HostBlock>& out) {
  while (units_.free_count() < count && !unused_.empty()) evict_one();
  if (!units_.take_all(count, out))
    throw CapacityError("host pool exhausted: the caller must check free_count() first");
}

void HostPool::give_back(std::span<const HostBlock> units) {
  for (HostBlock u : units) units_.give_back(u);
}

void HostPool::evict_one() {
  const Handle block = unused_.begin();
  give_back(block->units);
  names_.erase(block->name);
  unused_.erase(block);
  ++evicted_;
}

std::vector<HostPool::Handle> HostPool::find_run(std::span<const BlockName> names) {
  std::vector<Handle> run;
  for (const BlockName& name : names) {
    const auto found = names_.find(name);
    if (found == names_.end()) break;
    run.push_back(found->second);
  }
  return run;
}

void HostPool::use(Handle block) {
  if (block->users++ == 0) used_.splice(used_.end(), unused_, block);
  ++reused_;
}

std::optional<HostPool::Handle> HostPool::keep(const BlockName& name,
                                               std::span<const HostBlock> units) {
  if (names_.contains(name)) return std::nullopt;
  used_.push_back({name, {units.begin(), units.end()}});
  const Handle block = std::prev(used_.end());
  names_.emplace(name, block);
  return block;
}

void HostPool::release(Handle block) {
  if (--block->users > 0) return;
  if (block->named) {
    unused_.splice(unused_.end(), used_, block);
    return;
  }
  give_back(block->units);
  used_.erase(block);
}

void HostPool::touch(const BlockName& name) {
  const auto found = names_.find(name);
  if (found != names_.end() && found->second->users == 0)
    unused_.splice(unused_.end(), unused_, found->second);
}

void HostPool::forget(Handle block) {
  if (std::exchange(block->named, false)) names_.erase(block->name);
}

}  // namespace oasis
