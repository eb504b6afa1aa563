#include "olla/layout/greedy/by_birth.hpp"

#include <algorithm>
#include <map>
#include <queue>
#include <set>

namespace olla {
namespace {

// Free bytes below the highest one in use, and all those above it.
class Holes {
 public:
  Offset take(Bytes size) {
    const auto best = by_size_.lower_bound({size, 0});
    if (best == by_size_.end()) {
      top_ += size;
      return top_ - size;
    }
    const auto [hole, offset] = *best;
    erase(offset, hole);
    if (hole > size) insert(offset + size, hole - size);
    return offset;
  }

  void give(Offset offset, Bytes size) {
    const auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto [before, bytes] = *std::prev(after);
      if (before + bytes == offset) {
        erase(before, bytes);
        offset = before;
        size += bytes;
      }
    }
    if (const auto next = by_offset_.find(offset + size); next != by_offset_.end()) {
      const Bytes bytes = next->second;
      erase(next->first, bytes);
      size += bytes;
    }
    if (offset + size == top_) {
      top_ = offset;
    } else {
      insert(offset, size);
    }
  }

 private:
  void insert(Offset offset, Bytes size) {
    by_offset_[offset] = size;
    by_size_.emplace(size, offset);
  }
  void erase(Offset offset, Bytes size) {
    by_offset_.erase(offset);
    by_size_.erase({size, offset});
  }

  Bytes top_ = 0;
  std::map<Offset, Bytes> by_offset_;
  std::set<std::pair<Bytes, Offset>> by_size_;
};

}  // namespace

std::vector<Offset> fit_by_birth(const Part& part, Section short_sections) {
  std::vector<Offset> offsets(part.items.size(), kUnplaced);
  using Death = std::pair<Section, ItemId>;
  std::priority_queue<Death, std::vector<Death>, std::greater<>> deaths;
  Holes holes;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Item& item = part.items[i];
    if (item.last - item.first <= short_sections) continue;
    for (; !deaths.empty() && deaths.top().first <= item.first; deaths.pop()) {
      const ItemId dead = deaths.top().second;
      holes.give(offsets[dead], part.items[dead].size);
    }
    offsets[i] = holes.take(item.size);
    deaths.emplace(item.last, i);
  }
  return offsets;
}

}  // namespace olla
