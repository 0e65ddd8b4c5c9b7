// How finely a step's work is cut, so that the grid is busy to the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace oasis::cuda {

// Items a split, for sequences of `lengths` items that are each worked on by `units_each`
// independent units (heads x lane tiles), on a grid of `grid` CTAs that take one (split, unit) at a
// time. A split costs its items and `fixed` more. Sequences are cut evenly: one of n items into
// ceil(n / size) splits of about equal size.
inline int64_t split_size(const std::vector<int64_t>& lengths, int64_t units_each, int64_t grid,
                          int64_t fixed) {
  const int64_t longest = lengths.empty() ? 1 : *std::max_element(lengths.begin(), lengths.end());
  int64_t best = longest, best_cost = INT64_MAX;
  for (int64_t n = 1; n <= std::min<int64_t>(longest, 128); ++n) {
    const int64_t size = (longest + n - 1) / n;
    int64_t splits = 0;
    for (int64_t length : lengths) splits += (length + size - 1) / size;
    const int64_t waves = (splits * units_each + grid - 1) / grid;
    const int64_t cost = waves * (size + fixed);
    if (cost < best_cost) best = size, best_cost = cost;
  }
  return best;
}

}  // namespace oasis::cuda
