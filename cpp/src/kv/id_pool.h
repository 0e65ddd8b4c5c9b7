// A fixed set of ids, handed out lowest first at the start and last-freed first after. One owner an
// id.
#pragma once

#include <stdexcept>
#include <vector>

#include "oasis/types.h"

namespace oasis {

template <class IdT>
class IdPool {
 public:
  explicit IdPool(int64_t size) : taken_(size, false) {
    free_.reserve(size);
    for (int64_t i = size; i-- > 0;) free_.push_back(IdT(i));
  }

  int64_t size() const { return static_cast<int64_t>(taken_.size()); }
  int64_t free_count() const { return static_cast<int64_t>(free_.size()); }

  IdT take() {
    if (free_.empty())
      throw CapacityError("pool exhausted: the caller must check free_count() first");
    const IdT id = free_.back();
    free_.pop_back();
    taken_[id.value] = true;
    return id;
  }

  void give_back(IdT id) {
    if (!id.valid() || id.value >= size() || !taken_[id.value])
      throw std::logic_error("id given back twice or never taken");
    taken_[id.value] = false;
    free_.push_back(id);
  }

  // Takes `count` ids onto the end of `out`, or none.
  bool take_all(int64_t count, std::vector<IdT>& out) {
    if (count > free_count()) return false;
    for (int64_t i = 0; i < count; ++i) out.push_back(take());
    return true;
  }

  void give_back_all(std::vector<IdT>& ids) {
    for (IdT id : ids) give_back(id);
    ids.clear();
  }

 private:
  std::vector<IdT> free_;
  std::vector<bool> taken_;
};

}  // namespace oasis
