// The memory of the tiers on the CPU backend, float32: what the ids of Pools name.
#pragma once

#include <vector>

#include "backend/cpu/memory.h"
#include "oasis/config.h"

namespace oasis::cpu {

// Per layer: [page][kv_head][K|V][16][D].
class DeviceTier {
 public:
  explicit DeviceTier(const CoreConfig& c);

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
class HostTier {
 public:
  explicit HostTier(const CoreConfig& c);

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
class SummaryTier {
 public:
  explicit SummaryTier(const CoreConfig& c);

  float* page(int l, SummaryPage p) const { return layers_[l].data() + p.value * page_floats_; }
  // The two vectors of one block-head of the sequence whose pages these are.
  float* entry(int l, const std::vector<SummaryPage>& pages, int head, LogicalBlock b) const {
    return page(l, pages[b.value / kSummaryBlocks]) + head * head_floats_ +
           (b.value % kSummaryBlocks) * (head_floats_ / kSummaryBlocks);
  }

 private:
  std::vector<Memory> layers_;
  int64_t page_floats_, head_floats_;
};

struct Tiers {
  explicit Tiers(const CoreConfig& c) : device(c), host(c), summary(c) {}
  DeviceTier device;
  HostTier host;
  SummaryTier summary;
};

}  // namespace oasis::cpu
