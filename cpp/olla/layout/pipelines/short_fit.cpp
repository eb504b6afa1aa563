#include "olla/layout/pipelines/short_fit.hpp"

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

bool ShortFit::fits(std::span<const ItemId> items) {
  if (items.size() > kMaxItems) return false;
  placed_.clear();
  num_steps_ = 0;
  max_steps_ = kMinSteps + kStepsPerItem * items.size();
  // Most fail by one item that fits nowhere.
  const auto fits_alone = [&](ItemId i) { return any_end(part_.items[i], [](Offset) { return true; }); };
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
      if (high - low >= item.size && try_at(low)) return true;
      if (high - low > item.size && try_at(high - item.size)) return true;
      if (k < num_around) low = std::max(low, around[k].last);
    }
  }
  return false;
}

// Tries the first and, where that has a place, the others: no deeper than there are items.
bool ShortFit::place(std::span<const ItemId> items) {
  if (items.empty()) return true;
  if (++num_steps_ > max_steps_) return false;
  const Item& item = part_.items[items.front()];
  return any_end(item, [&](Offset offset) {
    placed_.push_back({offset, offset + item.size, item.first, item.last});
    if (place(items.subspan(1))) return true;
    placed_.pop_back();
    return false;
  });
}

}  // namespace olla
