// The ids of the core. Each is its own type: a host block can never be used as a device page.
#pragma once

#include <compare>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace oasis {

template <class Tag>
struct Id {
  int32_t value = -1;

  constexpr Id() = default;
  constexpr explicit Id(int64_t v) : value(static_cast<int32_t>(v)) {}
  constexpr bool valid() const { return value >= 0; }
  constexpr auto operator<=>(const Id&) const = default;
};

using DevicePage =
    Id<struct DevicePageTag>;  // a block's place in the device pool, the same in every layer
using HostBlock = Id<struct HostBlockTag>;  // one (layer, block) unit of the host pool
using SummaryPage =
    Id<struct SummaryPageTag>;  // the summaries of 64 consecutive blocks, the same in every layer
using TableRow = Id<struct TableRowTag>;  // a request's row in tables by request, until it ends
using LogicalBlock = Id<struct LogicalBlockTag>;  // a block's number within its sequence
using Slot = Id<struct SlotTag>;                  // an index into a sparse sequence's working set

using RequestId = int64_t;

inline constexpr int kBlockTokens = 16;
inline constexpr int kSummaryBlocks = 64;  // blocks a summary page holds
inline constexpr int kMaxDraftLen = 15;    // so that at most one block completes a step
// Of a sparse sequence, for blocks that are open: the one that settles in a step, the one that the
// step's first row is in, and the next, which its last row may reach.
inline constexpr int kLocalPages = 3;

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t blocks_for(int64_t tokens) { return div_up(tokens, kBlockTokens); }

// A request that cannot be served by these pools, now or ever.
struct CapacityError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace oasis
