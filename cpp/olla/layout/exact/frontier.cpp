#include "olla/layout/exact/frontier.hpp"

#include <algorithm>
#include <bit>
#include <tuple>

#include "olla/base/hash.hpp"

namespace olla {

Frontier::Frontier(const Part& part, const ExactRules& rules)
    : part_(part), rules_(rules), shape_(part.items.size()), work_(part.section_load.size()) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (!part.is_fixed(i)) free_.push_back(i);
  }
  const auto key = [&](ItemId i) { return std::tuple(part.items[i].first, part.items[i].last, part.items[i].size); };
  std::ranges::stable_sort(free_, {}, key);
  for (std::size_t k = 0; k < free_.size(); ++k) {
    const bool is_twin = k > 0 && key(free_[k]) == key(free_[k - 1]);
    shape_[free_[k]] = is_twin ? shape_[free_[k - 1]] : static_cast<std::int32_t>(k);
  }
}

bool Frontier::start(Level capacity, Bytes unit, Group& all) {
  capacity_ = capacity;
  fixed_lives_.clear();
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (!part_.is_fixed(i)) continue;
    const Item& item = part_.items[i];
    const Offset offset = part_.fixed[i];
    const auto begin = static_cast<Level>(std::min<Bytes>(offset / unit, kMaxLevel));
    const auto end = static_cast<Level>(std::min<Bytes>((offset + item.size + unit - 1) / unit, kMaxLevel));
    if (begin >= end) continue;
    fixed_lives_.push_back({item.first, item.last, begin, end - begin});
  }
  std::ranges::stable_sort(fixed_lives_, {}, &FixedLife::offset);
  const std::int32_t num_items = num_free();
  reserve(4 * num_items + 4);
  all = {0, num_items, num_items, 0, part_.num_sections(), 0, part_.num_sections(), {}};
  for (std::int32_t k = 0; k < num_items; ++k) {
    const Item& item = part_.items[free_[k]];
    const auto size = static_cast<Level>(std::min<Bytes>((item.size + unit - 1) / unit, kMaxLevel));
    open_[k] = {0, 0, size, item.first, item.last, free_[k], false};
    order_[k] = k;
  }
  find_windows();
  for (std::int32_t k = 0; k < num_items; ++k) {
    open_[k].release = fit(open_[k].item, 0);
    const StateHash own = hash(open_[k]);
    all.hash = {all.hash.slot + own.slot, all.hash.check + own.check};
    if (open_[k].release > capacity - open_[k].size) return false;
  }
  sort(all);
  return !overfull(all, 0, part_.num_sections());
}

void Frontier::find_windows() {
  windows_.item.clear();
  windows_.offset.assign(1, 0);
  if (fixed_lives_.empty()) return;
  for (std::int32_t k = 0; k < num_free(); ++k) {
    const Open& open = open_[k];
    Level low = 0;
    for (const FixedLife& fixed : fixed_lives_) {
      if (open.first >= fixed.last || fixed.first >= open.last) continue;
      if (fixed.offset - open.size >= low) windows_.item.push_back({low, fixed.offset - open.size});
      low = std::max(low, fixed.offset + fixed.size);
    }
    windows_.item.push_back({low, kNoLevel});
    windows_.offset.push_back(std::ssize(windows_.item));
  }
}

Level Frontier::fit(ItemId item, Level above) const {
  if (fixed_lives_.empty()) return above;
  const auto reaches = [&](const Window& window) { return window.end >= above; };
  return std::max(above, std::ranges::find_if(windows_[shape_[item]], reaches)->begin);
}

Level Frontier::next_window(ItemId item, Level above) const {
  if (fixed_lives_.empty()) return kNoLevel;
  const auto windows = windows_[shape_[item]];
  const auto next = std::ranges::find_if(windows, [&](const Window& window) { return window.begin > above; });
  return next == windows.end() ? kNoLevel : next->begin;
}

StateHash Frontier::hash(const Open& open) const {
  const std::uint64_t own = mixed(static_cast<std::uint64_t>(shape_[open.item] + 1) << 32 | static_cast<std::uint32_t>(open.base));
  return {own, std::rotl(own, 32)};
}

void Frontier::reserve(std::size_t size) {
  if (size <= open_.size()) return;
  for (auto* values : {&order_, &group_of_}) values->resize(2 * size);
  open_.resize(2 * size);
  rose_.resize(2 * size);
}

// Insertion sort: the group is nearly sorted.
void Frontier::sort(const Group& group) {
  for (std::int32_t k = group.begin + 1; k < group.end; ++k) {
    const std::int32_t x = order_[k];
    const Level release = open_[x].release;
    std::int32_t l = k;
    for (; l > group.begin && open_[order_[l - 1]].release > release; --l) order_[l] = order_[l - 1];
    order_[l] = x;
  }
}

void Frontier::add_fixed(std::span<const FixedLife>& left, Level release, Section first, Section last, std::vector<Level>& work) {
  for (; !left.empty() && left.back().offset >= release; left = left.first(left.size() - 1)) {
    const FixedLife& fixed = left.back();
    for (Section s = std::max(fixed.first, first); s < std::min(fixed.last, last); ++s) work[s] += fixed.size;
  }
}

// Whether in some section of [first, last) items must end above the capacity, whatever their order: those with a release of r or
// more are stacked from r upwards. Source: the one-machine problem with release times.
bool Frontier::overfull(const Group& group, Section first, Section last) {
  if (first >= last) return false;
  std::fill(work_.begin() + first, work_.begin() + last, 0);
  Level* const work = work_.data();
  const Open* const open = open_.data();
  std::span<const FixedLife> left = fixed_lives_;
  for (std::int32_t k = group.end - 1; k >= group.begin; --k) {
    const Open& item = open[order_[k]];
    const Section from = std::max(item.first, first), to = std::min(item.last, last);
    if (from >= to) continue;
    const Level release = rules_.use_machine ? item.release : 0, size = item.size;
    add_fixed(left, release, first, last, work_);
    Level most = 0;
    for (Section s = from; s < to; ++s) {
      work[s] += size;
      most = std::max(most, work[s]);
    }
    if (most <= capacity_ - release) continue;
    culprit_ = static_cast<Section>(std::find(work + from, work + to, most) - work);
    return true;
  }
  return false;
}

bool Frontier::place(const Group& group, std::int32_t x, std::vector<Group>& rest) {
  rest.clear();
  culprit_ = -1;
  const Group from = group;  // by value: rest may be where it stands
  const Open placed = open_[x];
  const Level top = placed.release + placed.size;
  if (top > capacity_) return false;
  const std::int32_t base = from.limit, limit = base + (from.end - from.begin - 1);
  reserve(limit);
  std::int32_t out = base;
  Section reach = 0;
  for (std::int32_t k = from.begin; k < from.end; ++k) {
    if (k == x) continue;
    Open& item = open_[out] = open_[k];
    if (rest.empty() || (rules_.use_split && item.first >= reach)) {
      rest.push_back({out, out, limit, item.first, item.last, part_.num_sections(), 0, {}});
      reach = item.last;
    }
    Group& last = rest.back();
    last.last = reach = std::max(reach, item.last);
    rose_[out] = false;
    if (meet(item, placed)) {
      item.base = std::max(item.base, top);
      item.postponed = false;
      if (item.release < top) {
        item.release = fit(item.item, top);
        if (item.release > capacity_ - item.size) return false;
        rose_[out] = true;
        last.raised_first = std::min(last.raised_first, item.first);
        last.raised_last = std::max(last.raised_last, item.last);
      }
    }
    const StateHash own = hash(item);
    last.hash = {last.hash.slot + own.slot, last.hash.check + own.check};
    group_of_[out] = static_cast<std::int32_t>(rest.size()) - 1;
    last.end = ++out;
  }
  deal(from, x, base, rest);
  for (const Group& g : rest) {
    if (overfull(g, g.raised_first, g.raised_last)) return false;
  }
  return true;
}

// Merges the items that rose with the others, by release, and deals them to their groups.
void Frontier::deal(const Group& group, std::int32_t x, std::int32_t base, std::span<Group> rest) {
  risen_.clear();
  calm_.clear();
  for (std::int32_t k = group.begin; k < group.end; ++k) {
    const std::int32_t old = order_[k];
    if (old == x) continue;
    const std::int32_t now = base + (old - group.begin) - (old > x);
    (rose_[now] ? risen_ : calm_).push_back(now);
  }
  if (!fixed_lives_.empty()) std::ranges::stable_sort(risen_, {}, [&](std::int32_t k) { return open_[k].release; });
  cursor_.clear();
  for (const Group& g : rest) cursor_.push_back(g.begin);
  const auto put = [&](std::int32_t k) { order_[cursor_[group_of_[k]]++] = k; };
  std::size_t next = 0;
  for (const std::int32_t k : calm_) {
    while (next < risen_.size() && open_[risen_[next]].release < open_[k].release) put(risen_[next++]);
    put(k);
  }
  while (next < risen_.size()) put(risen_[next++]);
}

// The next possible release of a postponed item: on a fixed item, or, at `rest` or above, on an open item.
Level Frontier::raised_release(const Open& open, Level rest, bool& on_fixed) const {
  const Level window = next_window(open.item, open.release);
  const Level release = rest >= kNoLevel ? kNoLevel : fit(open.item, std::max(rest, open.release));
  on_fixed = window <= release && window < kNoLevel;
  return std::min(window, release);
}

bool Frontier::postpone(const Group& group, std::int32_t x) {
  const Open late = open_[x];
  Level rest = kNoLevel;
  for (std::int32_t k = group.begin; k < group.end; ++k) {
    if (k != x && meet(open_[k], late)) rest = std::min(rest, open_[k].release + open_[k].size);
  }
  bool on_fixed = false;
  const Level release = raised_release(late, rest, on_fixed);
  if (release > capacity_ - late.size) return false;
  for (std::int32_t k = group.begin; k < group.end; ++k) {
    const bool is_twin = rules_.use_twins && shape_[open_[k].item] == shape_[late.item] && open_[k].release <= late.release;
    if (k != x && !is_twin) continue;
    open_[k].release = release;
    open_[k].postponed = !on_fixed;
  }
  sort(group);
  return !overfull(group, late.first, late.last);
}

// Raises items in the order of the lowest top they can rest on (Dijkstra): items that could only rest on each other fail.
bool Frontier::settle(const Group& group) {
  pending_.clear();
  for (std::int32_t k = group.begin; k < group.end; ++k) {
    if (!open_[k].postponed) continue;
    Level rest = kNoLevel;
    for (std::int32_t l = group.begin; l < group.end; ++l) {
      if (!open_[l].postponed && meet(open_[k], open_[l])) rest = std::min(rest, open_[l].release + open_[l].size);
    }
    pending_.emplace_back(k, rest);
  }
  Section first = part_.num_sections(), last = 0;
  while (!pending_.empty()) {
    std::size_t best = 0;
    Level best_release = kNoLevel + 1;
    bool best_on_fixed = false;
    for (std::size_t p = 0; p < pending_.size(); ++p) {
      bool on_fixed = false;
      const Level release = raised_release(open_[pending_[p].first], pending_[p].second, on_fixed);
      if (release < best_release) best = p, best_release = release, best_on_fixed = on_fixed;
    }
    Open& open = open_[pending_[best].first];
    if (best_release > capacity_ - open.size) return false;
    if (best_release > open.release) {
      open.release = best_release;
      open.postponed = !best_on_fixed;
      first = std::min(first, open.first);
      last = std::max(last, open.last);
    }
    pending_[best] = pending_.back();
    pending_.pop_back();
    for (auto& [k, rest] : pending_) {
      if (meet(open_[k], open)) rest = std::min(rest, open.release + open.size);
    }
  }
  sort(group);
  return !overfull(group, first, last);
}

}  // namespace olla
