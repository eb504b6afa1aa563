#include "olla/stack_outlook.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

namespace olla {
namespace {

constexpr double kSideBySide = 0.3, kScattered = 0.3;  // of the score: for two rooms; against free space in many holes
constexpr Bytes kCrumbs = 4;                           // a hole so many times smaller than the largest short-lived item is lost

}  // namespace

StackOutlook::StackOutlook(const Part& part, const Floor& floor, std::vector<Stack> stacks)
    : part_(part),
      stacks_(std::move(stacks)),
      stack_of_(part.items.size(), -1),
      deaths_(stacks_.size()),
      load_(part.section_load.size() + 1, 0),
      fit_(part),
      local_(stacks_.size(), -1) {
  for (StackId s = 0; s < std::ssize(stacks_); ++s) {
    for (const ItemId i : stacks_[s].items) {
      stack_of_[i] = s;
      births_.push_back(part.items[i].first);
    }
  }
  std::iota(deaths_.begin(), deaths_.end(), 0);
  std::ranges::stable_sort(deaths_, {}, [&](StackId s) { return stacks_[s].last_death; });
  std::ranges::sort(births_);
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (floor.offsets[i] != kUnplaced) continue;
    load_[part.items[i].first] += part.items[i].size;
    load_[part.items[i].last] -= part.items[i].size;
    if (stack_of_[i] < 0) others_.push_back(i);
  }
  std::partial_sum(load_.begin(), load_.end(), load_.begin());
}

// What is alive when less than the largest of them would be free.
void StackOutlook::begin(Bytes capacity) {
  capacity_ = capacity;
  tight_.assign(stacks_.size(), {});
  last_tight_.assign(stacks_.size(), {});
  gaps_.assign(1, 0);
  Bytes largest = 0;
  for (const ItemId i : others_) largest = std::max(largest, part_.items[i].size);
  crumb_ = std::max<Bytes>(1, largest / kCrumbs);
  for (const ItemId i : others_) {
    const Item& item = part_.items[i];
    const Bytes most = *std::max_element(load_.begin() + item.first, load_.begin() + item.last);
    if (capacity_ - most >= largest) continue;
    gaps_.push_back(item.size);
    const auto born = std::ranges::upper_bound(stacks_, item.first, {}, &Stack::birth) - stacks_.begin();
    if (born > 0) {
      tight_[born - 1].push_back(i);
      for (const ItemId of_stack : stacks_[born - 1].items) {
        const Item& later = part_.items[of_stack];
        if (later.first > item.first) gaps_.push_back(std::max<Bytes>(0, item.size - later.size));
      }
    }
    auto dead = std::ranges::lower_bound(deaths_, item.last, {}, [&](StackId s) { return stacks_[s].last_death; });
    while (dead != deaths_.end() && stacks_[*dead].birth >= item.first) ++dead;
    if (dead == deaths_.end()) continue;
    const Stack& stack = stacks_[*dead];
    for (const ItemId of_stack : stack.items) {
      const Section death = part_.items[of_stack].last;
      if (death >= item.first && death <= item.last) gaps_.push_back(std::max<Bytes>(0, item.size - part_.items[of_stack].size));
    }
    const auto last_birth = std::ranges::lower_bound(births_, stack.first_death);
    if (last_birth != births_.begin() && item.last > *std::prev(last_birth)) last_tight_[*dead].push_back(i);
  }
  std::ranges::sort(gaps_);
  gaps_.erase(std::ranges::unique(gaps_).begin(), gaps_.end());
}

StackOutlook::StackId StackOutlook::first_tight() const {
  StackId first = 0;
  while (first + 1 < std::ssize(stacks_) && tight_[first].empty()) ++first;
  return first;
}

// The stack in whose room this one will be born, of those born until the present one.
StackOutlook::StackId StackOutlook::room_of(StackId stack, StackId present) const {
  while (stack > present) stack = stacks_[stack].room;
  return stack;
}

// Who is alive, and which rooms follow each other.
void StackOutlook::look_ahead(StackId present) {
  present_ = present;
  for (const StackId s : alive_) local_[s] = -1;
  alive_.clear();
  successions_.clear();
  const Section now = stacks_[present_].birth;
  const auto from = std::ranges::upper_bound(deaths_, now, {}, [&](StackId s) { return stacks_[s].last_death; });
  for (auto s = from; s != deaths_.end(); ++s) {
    if (*s > present_) continue;
    local_[*s] = static_cast<std::int32_t>(alive_.size());
    alive_.push_back(*s);
  }
  dying_ = alive_[0] == present_ && alive_.size() > 1 ? alive_[1] : alive_[0];
  needed_.assign(alive_.size(), 0);
  const auto horizon = std::min<std::ptrdiff_t>(deaths_.end() - from, 4 * std::ssize(alive_) + 1);
  for (std::ptrdiff_t k = 1; k < horizon; ++k) {
    const StackId dies = from[k], room = room_of(dies, present_), before = room_of(from[k - 1], present_);
    if (room < 0 || before < 0 || room == before || local_[room] < 0 || local_[before] < 0) continue;
    needed_[std::min(local_[room], local_[before])] |= std::uint64_t{1} << std::max(local_[room], local_[before]);
    if (dies == room) successions_.emplace_back(before, dies);
  }
}

// Whether what is tight until the next birth fits.
bool StackOutlook::holds(const std::vector<Cell>& cells) {
  const std::vector<ItemId>& tight = tight_[present_];
  if (tight.empty()) return true;
  Section begin = part_.items[tight.front()].first, end = 0;
  for (const ItemId i : tight) end = std::max(end, part_.items[i].last);
  fit_.begin();
  Offset low = 0;
  for (const Cell& cell : cells) {
    const Item& item = part_.items[cell.item];
    if (item.first > begin || item.last < end) {
      fit_.add_cell(cell.first, cell.last, item.first, item.last);
      continue;
    }
    if (cell.first > low) fit_.add_hole(low, cell.first);
    low = cell.last;
  }
  if (capacity_ > low) fit_.add_hole(low, capacity_);
  return fit_.fits(tight, ShortFit::kNoLimit);
}

// Whether what is tight when the stack dies would fit if as much as is free now, but for crumbs, lay anywhere in the room. The next
// stack takes the room of the one that dies next together with what is free now, which joins no others.
bool StackOutlook::would_hold(const std::vector<Cell>& cells, StackId stack, StackId room) {
  if (last_tight_[stack].empty()) return true;
  fit_.begin();
  Bytes free = 0;
  Offset low = 0, end = 0;
  const auto add_hole = [&](Offset high) {
    if (high > low) fit_.add_hole(low, high);
  };
  const auto add_free = [&](Offset to) {
    if (to - end < crumb_) return;
    free += to - end;
    if (room == dying_) return;
    add_hole(end);
    low = to;
  };
  for (const Cell& cell : cells) {
    add_free(cell.first);
    end = cell.last;
    const StackId own = stack_of_[cell.item];
    if (own == stack) fit_.add_cell(cell.first, cell.last, -1, part_.items[cell.item].last);
    if (own == stack || own == room) continue;
    add_hole(cell.first);
    low = cell.last;
  }
  add_free(capacity_);
  add_hole(capacity_);
  return fit_.fits(last_tight_[stack], free);
}

double StackOutlook::score(const std::vector<Cell>& cells) {
  double score = 0;
  for (const auto& [room, stack] : successions_) score += would_hold(cells, stack, room);
  std::array<std::uint64_t, kMaxAlive> beside{};
  double roots = 0, free = 0;
  Offset low = 0;
  std::int32_t left = -1;
  const auto add_hole = [&](Offset high) {
    roots += std::sqrt(static_cast<double>(high - low));
    free += static_cast<double>(high - low);
  };
  for (const Cell& cell : cells) {
    const std::int32_t right = local_[stack_of_[cell.item]];
    add_hole(cell.first);
    if (left >= 0 && left != right) beside[std::min(left, right)] |= std::uint64_t{1} << std::max(left, right);
    low = cell.last;
    left = right;
  }
  add_hole(capacity_);
  for (std::size_t k = 0; k < needed_.size(); ++k) score += kSideBySide * std::popcount(beside[k] & needed_[k]);
  return free > 0 ? score - kScattered * roots / std::sqrt(free) : score;
}

}  // namespace olla
