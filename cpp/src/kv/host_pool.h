// The units of the host pool, and the blocks that are kept in some of them under a name: the prefix
// cache.
//
// A kept block is a unit a layer whose content never changes. It has as many users as requests that
// hold it; once it has none it stays until its units are needed. Unused blocks go in the order in
// which they were last let go, children before their parents: whoever lets go of a block lets go of
// its children first, and touches the parents that others have left (SequenceKv's destructor).
#pragma once

#include <array>
#include <cstring>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/id_pool.h"

namespace oasis {

// Stands for all tokens from the sequence's first to the block's last.
using BlockName = std::array<uint8_t, 16>;

class HostPool {
 public:
  struct Kept {
    BlockName name;
    std::vector<HostBlock> units;  // [layer]
    int64_t users = 1;
    bool named = true;  // else it was forgotten: it goes with its last user
  };
  using Handle = std::list<Kept>::iterator;  // of a block in use, until its last user releases it

  HostPool(int64_t units, int layers) : units_(units), layers_(layers) {}

  int64_t size() const { return units_.size(); }
  // What a newcomer can have: the units of unused blocks are as good as free.
  int64_t free_count() const { return units_.free_count() + unused_units(unused_.size()); }
  // The same for a newcomer that is about to use these blocks.
  int64_t free_count_beside(const std::vector<Handle>& blocks) const;

  // `count` units onto the end of `out`. There must be as many (free_count).
  void take(int64_t count, std::vector<HostBlock>& out);
  void give_back(std::span<const HostBlock> units);

  // The longest run of the first of these names whose blocks are kept.
  std::vector<Handle> find_run(std::span<const BlockName> names);
  void use(Handle block);
  // From here on the units are the pool's and the caller one user of the block. Nothing changes
  // when another block has that name.
  std::optional<Handle> keep(const BlockName& name, std::span<const HostBlock> units);
  void release(Handle block);
  // If a block has that name and nobody uses it, it is now the last to go.
  void touch(const BlockName& name);
  // Nobody finds it by its name any more.
  void forget(Handle block);

  int64_t blocks_cached() const { return static_cast<int64_t>(names_.size()); }
  int64_t blocks_reused() const { return reused_; }    // in all, a block once for each request
  int64_t blocks_evicted() const { return evicted_; }  // in all

 private:
  struct Hash {  // a name is a hash: any part of it will do
    size_t operator()(const BlockName& name) const {
      size_t value;
      std::memcpy(&value, name.data(), sizeof value);
      return value;
    }
  };
  int64_t unused_units(size_t blocks) const { return static_cast<int64_t>(blocks) * layers_; }
  void evict_one();

  IdPool<HostBlock> units_;
  int layers_;
  std::list<Kept> used_, unused_;  // unused: in the order in which they go
  std::unordered_map<BlockName, Handle, Hash> names_;
  int64_t reused_ = 0, evicted_ = 0;
};

}  // namespace oasis
