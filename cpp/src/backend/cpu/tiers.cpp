#include "backend/cpu/tiers.h"

namespace oasis::cpu {
namespace {

std::vector<Memory> per_layer(int layers, int64_t floats, const char* what) {
  std::vector<Memory> out;
  for (int l = 0; l < layers; ++l) out.emplace_back(floats, what);
  return out;
}

}  // namespace

DeviceTier::DeviceTier(const CoreConfig& c)
    : layers_(per_layer(c.num_layers, c.device_pages * c.page_elements(), "device KV pool")),
      page_floats_(c.page_elements()),
      block_head_floats_(c.block_head_elements()) {}

HostTier::HostTier(const CoreConfig& c)
    : memory_(c.host_blocks * c.page_elements(), "host KV pool"),
      complete_(c.host_blocks),
      unit_floats_(c.page_elements()),
      block_head_floats_(c.block_head_elements()) {}

SummaryTier::SummaryTier(const CoreConfig& c)
    : layers_(per_layer(c.num_layers, c.summary_pages_needed() * c.summary_page_elements(),
                        "summary pool")),
      page_floats_(c.summary_page_elements()),
      head_floats_(c.summary_page_elements() / c.num_kv_heads) {}

}  // namespace oasis::cpu
