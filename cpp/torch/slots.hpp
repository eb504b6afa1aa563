// Which blocks of an arena are in use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "plan.hpp"

namespace olla::replay {

// Take and give are O(log blocks) and, once warm, allocate nothing.
class Slots {
 public:
  // A block in use: [offset, end), taken by a request of op `owner`.
  struct Held {
    Offset offset;
    Offset end;
    OpId owner;
  };

  // False when a block in use overlaps [offset, offset + bytes). `charge`: the bytes it adds to used_bytes().
  bool take(Offset offset, Bytes bytes, Bytes charge, OpId owner = kNoOp) {
    const auto next = used_.lower_bound(offset);
    if (next != used_.end() && next->first < offset + bytes) return false;
    if (next != used_.begin() && std::prev(next)->second.end > offset) return false;
    const Block block{offset + bytes, charge, owner};
    if (spare_.empty()) {
      used_.emplace_hint(next, offset, block);
    } else {
      auto node = std::move(spare_.back());
      spare_.pop_back();
      node.key() = offset;
      node.mapped() = block;
      used_.insert(next, std::move(node));
    }
    used_bytes_ += charge;
    return true;
  }

  // False when no block starts there.
  bool give(Offset offset) {
    const auto block = used_.find(offset);
    if (block == used_.end()) return false;
    used_bytes_ -= block->second.charge;
    spare_.push_back(used_.extract(block));
    return true;
  }

  std::vector<Held> held() const {
    std::vector<Held> blocks;
    blocks.reserve(used_.size());
    for (const auto& [offset, block] : used_) blocks.push_back({offset, block.end, block.owner});
    return blocks;
  }

  // How many blocks in use an op took. O(blocks in use).
  std::int64_t taken_by(OpId op) const {
    return std::ranges::count_if(used_, [&](const auto& block) { return block.second.owner == op; });
  }

  bool empty() const { return used_.empty(); }
  Bytes used_bytes() const { return used_bytes_; }

 private:
  struct Block {
    Offset end;
    Bytes charge;
    OpId owner;
  };
  using Used = std::map<Offset, Block>;
  Used used_;
  std::vector<Used::node_type> spare_;
  Bytes used_bytes_ = 0;
};

}  // namespace olla::replay
