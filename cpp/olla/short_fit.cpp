#include "olla/short_fit.hpp"

#include <algorithm>
#include <array>

namespace olla {
namespace {

constexpr std::size_t kStepsPerItem = 8, kMinSteps = 30, kMaxItems = 500;
constexpr std::size_t kMaxAround = 32;  // cells alive together in one hole

}  // namespace

void ShortFit::begin() {
  holes_.clear();
  cells_.clear();
}

void ShortFit::add_hole(Offset first, Offset last) {
  holes_.push_back({first, last, holes_.empty() ? 0 : holes_.back().last_cell, cells_.size()});
}

bool ShortFit::fits(std::span<const ItemId> items, Bytes max_outside) {
  if (items.size() > kMaxItems) return false;
  placed_.clear();
  num_steps_ = 0;
  max_steps_ = kMinSteps + kStepsPerItem * items.size();
  max_outside_ = max_outside;
  // Most fail by one item that fits nowhere.
  const auto fits_alone = [&](ItemId i) {
    const Item& item = part_.items[i];
    return any_end(item, [&](const Hole& hole, Offset at) { return outside(hole, at, at + item.size) <= max_outside_; });
  };
  return std::ranges::all_of(items, fits_alone) && place(items);
}

template <class TryAt>
bool ShortFit::any_end(const Item& item, TryAt&& try_at) const {
  struct Range {
    Offset first, last;
  };
  std::array<Range, kMaxAround> around;
  for (const Hole& hole : holes_) {
    if (hole.last - hole.first < item.size) continue;
    std::size_t num_around = 0;
    const auto add = [&](const Cell& cell) {
      if (cell.birth >= item.last || item.first >= cell.death) return true;
      if (num_around == kMaxAround) return false;
      std::size_t at = num_around++;
      for (; at > 0 && around[at - 1].first > cell.first; --at) around[at] = around[at - 1];
      around[at] = {cell.first, cell.last};
      return true;
    };
    bool has_all = true;
    for (std::size_t k = hole.first_cell; k < hole.last_cell; ++k) has_all = has_all && add(cells_[k]);
    for (const Cell& cell : placed_) {
      if (cell.first >= hole.first && cell.last <= hole.last) has_all = has_all && add(cell);
    }
    if (!has_all) continue;
    Offset low = hole.first;
    for (std::size_t k = 0; k <= num_around; ++k) {
      const Offset high = k < num_around ? around[k].first : hole.last;
      if (high - low >= item.size && try_at(hole, low)) return true;
      if (high - low > item.size && try_at(hole, high - item.size)) return true;
      if (max_outside_ < kNoLimit) {  // what lies in a cell that has died does not count
        for (std::size_t c = hole.first_cell; c < hole.last_cell; ++c) {
          const Offset first = cells_[c].first, last = cells_[c].last - item.size;
          if (low < first && first + item.size < high && try_at(hole, first)) return true;
          if (low < last && last + item.size < high && try_at(hole, last)) return true;
        }
      }
      if (k < num_around) low = std::max(low, around[k].last);
    }
  }
  return false;
}

// Tries the first and, where that has a place, the others: no deeper than there are items.
bool ShortFit::place(std::span<const ItemId> items) {
  if (items.empty()) return true;
  if (++num_steps_ > max_steps_) return false;
  return any_end(part_.items[items.front()], [&](const Hole& hole, Offset offset) { return place_at(hole, offset, items); });
}

bool ShortFit::place_at(const Hole& hole, Offset offset, std::span<const ItemId> items) {
  const Item& item = part_.items[items.front()];
  const Cell cell{offset, offset + item.size, item.first, item.last, outside(hole, offset, offset + item.size)};
  Bytes taken = cell.outside;
  for (const Cell& other : placed_) {
    if (other.birth < cell.death && cell.birth < other.death) taken += other.outside;
  }
  if (taken > max_outside_) return false;
  placed_.push_back(cell);
  if (place(items.subspan(1))) return true;
  placed_.pop_back();
  return false;
}

Bytes ShortFit::outside(const Hole& hole, Offset first, Offset last) const {
  Bytes bytes = last - first;
  for (std::size_t k = hole.first_cell; k < hole.last_cell; ++k) {
    bytes -= std::max<Bytes>(0, std::min(last, cells_[k].last) - std::max(first, cells_[k].first));
  }
  return bytes;
}

}  // namespace olla
