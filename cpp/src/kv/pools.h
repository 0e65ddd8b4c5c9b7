// The ids of the tiers. What they name, and where, is the backend's.
#pragma once

#include "kv/host_pool.h"
#include "oasis/config.h"

namespace oasis {

struct Pools {
  explicit Pools(const CoreConfig& c)
      : device(c.device_pages),
        host(c.host_blocks, c.num_layers),
        summary(c.summary_pages_needed()),
        rows(c.max_batch_size) {}

  IdPool<DevicePage> device;
  HostPool host;
  IdPool<SummaryPage> summary;
  IdPool<TableRow> rows;  // enough: who was preempted is resumed before anyone is admitted
};

}  // namespace oasis
