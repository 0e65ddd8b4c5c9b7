#include "kv/pools.h"

namespace oasis {
namespace {

int64_t summary_pages_for(const CoreConfig& c) {
  if (!c.sparse_enabled) return 0;
  if (c.summary_pages > 0) return c.summary_pages;
  return div_up(c.host_blocks / c.num_layers, kSummaryBlocks) + c.max_batch_size;
}

std::vector<Memory> per_layer(int layers, int64_t floats, const char* what) {
  std::vector<Memory> out;
  for (int l = 0; l < layers; ++l) out.emplace_back(floats, what);
  return out;
}

}  // namespace

DevicePool::DevicePool(const CoreConfig& c)
    : ids(c.device_pages),
      layers_(per_layer(c.num_layers, c.device_pages * c.page_floats(), "device KV pool")),
      page_floats_(c.page_floats()),
      block_head_floats_(c.block_head_floats()) {}

HostPool::HostPool(const CoreConfig& c)
    : ids(c.host_blocks),
      memory_(c.host_blocks * c.page_floats(), "host KV pool"),
      complete_(c.host_blocks),
      unit_floats_(c.page_floats()),
      block_head_floats_(c.block_head_floats()) {}

SummaryPool::SummaryPool(const CoreConfig& c)
    : ids(summary_pages_for(c)),
      layers_(per_layer(c.num_layers, ids.size() * c.summary_page_floats(), "summary pool")),
      page_floats_(c.summary_page_floats()),
      head_floats_(c.summary_page_floats() / c.num_kv_heads) {}

}  // namespace oasis
