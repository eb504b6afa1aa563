// Records the allocations made inside windows, and when each block was freed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pages.hpp"
#include "plan.hpp"

namespace olla::replay {

// Every allocation inside a window, in the order of the requests.
class Recording {
 public:
  struct Allocation {
    OpId op;
    std::int32_t index;  // it is the op's request of this number
    Bytes bytes;
    OpId freed_in = kNoOp;       // the op that ran, or ran last, when it was freed; kNoOp: alive at the end
    std::int64_t freed_at = -1;  // how many requests had been made when it was freed; -1: alive at the end
    const void* block = nullptr;
    std::int64_t made_at = 0;  // how many requests had been made before it
  };

  void start_op(OpId op) {
    last_op_ = op;
    index_ = 0;
  }
  void allocated(const void* block, OpId op, Bytes bytes) {
    if (block != nullptr) alive_.insert_or_assign(block, allocations_.size());
    allocations_.push_back({.op = op, .index = index_++, .bytes = bytes, .block = block, .made_at = made_++});
  }
  bool freed(const void* block) {
    const auto found = alive_.find(block);
    if (found == alive_.end()) return false;
    Allocation& allocation = allocations_[found->second];
    allocation.freed_in = last_op_;
    allocation.freed_at = made_;
    alive_.erase(found);
    return true;
  }
  // How many blocks of an op are alive. O(blocks alive).
  std::int64_t live(OpId op) const {
    return std::ranges::count_if(alive_, [&](const auto& block) { return allocations_[block.second].op == op; });
  }
  std::vector<Allocation> take() { return {allocations_.begin(), allocations_.end()}; }

  // For rising op numbers, such as a loop's iterations: the allocations of an op, and their removal.
  std::vector<Allocation> of(OpId op) const {
    const auto [first, last] = rows_of(op);
    return {allocations_.begin() + first, allocations_.begin() + last};
  }
  void forget(OpId op) {
    const auto [first, last] = rows_of(op);
    for (std::ptrdiff_t i = first; i < static_cast<std::ptrdiff_t>(allocations_.size()); ++i) {
      const auto found = allocations_[i].freed_at < 0 ? alive_.find(allocations_[i].block) : alive_.end();
      if (found == alive_.end() || found->second != static_cast<std::size_t>(i)) continue;  // freed, or its address reused
      if (i < last)
        alive_.erase(found);
      else
        found->second -= static_cast<std::size_t>(last - first);
    }
    allocations_.erase(allocations_.begin() + first, allocations_.begin() + last);
  }

 private:
  std::pair<std::ptrdiff_t, std::ptrdiff_t> rows_of(OpId op) const {
    const auto range = std::ranges::equal_range(allocations_, op, {}, &Allocation::op);
    return {range.begin() - allocations_.begin(), range.end() - allocations_.begin()};
  }

  OpId last_op_ = kNoOp;
  std::int32_t index_ = 0;
  std::int64_t made_ = 0;
  using Pool = std::pmr::unsynchronized_pool_resource;
  std::unique_ptr<Pool> pool_ = std::make_unique<Pool>(pages());
  std::pmr::vector<Allocation> allocations_{pool_.get()};
  std::pmr::unordered_map<const void*, std::size_t> alive_{pool_.get()};
};

}  // namespace olla::replay
