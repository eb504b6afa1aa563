// The allocations that an op list makes when nothing is planned yet.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

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
  };

  void start_op(OpId op) { last_op_ = op; }
  void allocated(const void* block, OpId op, std::int32_t index, Bytes bytes) {
    if (block != nullptr) alive_.insert_or_assign(block, allocations_.size());
    allocations_.push_back({.op = op, .index = index, .bytes = bytes, .block = block});
  }
  bool freed(const void* block) {
    const auto found = alive_.find(block);
    if (found == alive_.end()) return false;
    Allocation& allocation = allocations_[found->second];
    allocation.freed_in = last_op_;
    allocation.freed_at = static_cast<std::int64_t>(allocations_.size());
    alive_.erase(found);
    return true;
  }
  const std::vector<Allocation>& allocations() const { return allocations_; }
  std::vector<Allocation> take() { return std::move(allocations_); }

 private:
  OpId last_op_ = kNoOp;
  std::vector<Allocation> allocations_;
  std::unordered_map<const void*, std::size_t> alive_;
};

}  // namespace olla::replay
