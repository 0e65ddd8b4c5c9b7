// The three pools: device KV, host KV, summaries. Each couples the ids with the memory they name.
#pragma once

#include <vector>

#include "kv/id_pool.h"
#include "kv/memory.h"
#include "oasis/config.h"

namespace oasis {

// Per layer: [page][kv_head][K|V][16][D].
class DevicePool {
 public:
  explicit DevicePool(const CoreConfig& c);

  IdPool<DevicePage> ids;

  float* layer(int l) const { return layers_[l].data(); }
  float* page(int l, DevicePage p) const { return layer(l) + p.value * page_floats_; }
  float* block_head(int l, DevicePage p, int head) const {
    return page(l, p) + head * block_head_floats_;
  }

 private:
  std::vector<Memory> layers_;
  int64_t page_floats_, block_head_floats_;
};

// [host_block][kv_head][K|V][16][D]. A unit is complete once its write-through has ended; only a
// complete one may be fetched.
class HostPool {
 public:
  explicit HostPool(const CoreConfig& c);

  IdPool<HostBlock> ids;

  float* unit(HostBlock b) const { return memory_.data() + b.value * unit_floats_; }
  float* block_head(HostBlock b, int head) const { return unit(b) + head * block_head_floats_; }
  void mark_incomplete(HostBlock b) { complete_[b.value] = false; }  // it has a new owner
  void mark_complete(HostBlock b) { complete_[b.value] = true; }
  bool complete(HostBlock b) const { return complete_[b.value]; }

 private:
  Memory memory_;
  // Bytes: the transfer worker sets some while the scheduler clears others.
  std::vector<uint8_t> complete_;
  int64_t unit_floats_, block_head_floats_;
};

// Per layer: [summary_page][kv_head][64 blocks][2][D].
class SummaryPool {
 public:
  explicit SummaryPool(const CoreConfig& c);

  IdPool<SummaryPage> ids;

  float* page(int l, SummaryPage p) const { return layers_[l].data() + p.value * page_floats_; }
  float* head(int l, SummaryPage p, int h) const { return page(l, p) + h * head_floats_; }
  int64_t page_floats() const { return page_floats_; }
  int64_t entry_floats() const { return head_floats_ / kSummaryBlocks; }

 private:
  std::vector<Memory> layers_;
  int64_t page_floats_, head_floats_;
};

struct Pools {
  explicit Pools(const CoreConfig& c) : device(c), host(c), summary(c) {}
  DevicePool device;
  HostPool host;
  SummaryPool summary;
};

}  // namespace oasis
