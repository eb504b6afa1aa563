#include "olla/layout/pipelines/beam.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <unordered_set>

#include "olla/base/hash.hpp"

namespace olla {
namespace {

constexpr std::size_t kFirstWidth = 25, kMaxWidth = 800, kMaxSteps = 8'000'000;
constexpr std::array<double, 3> kRungs{1, 0.5, 0.125};
constexpr std::array<double, 2> kNoise{0.01, 1};  // the first breaks ties
constexpr std::size_t kCellsPerNode = 100;
constexpr std::size_t kMinRepeats = 4;
constexpr std::int64_t kMaxBaseWork = 100'000'000;

// The least p with which all values equal those p before them (Knuth, Morris, Pratt 1977).
std::size_t least_period(std::span<const std::uint64_t> values) {
  std::vector<std::size_t> border(values.size() + 1, 0);
  for (std::size_t k = 1, length = 0; k < values.size(); ++k) {
    while (length > 0 && values[k] != values[length]) length = border[length];
    if (values[k] == values[length]) ++length;
    border[k + 1] = length;
  }
  return values.size() - border.back();
}

}  // namespace

LongLivedBase find_base(const Part& part) {
  LongLivedBase base;
  base.offsets.assign(part.items.size(), kUnplaced);
  std::vector<ItemId> longest;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.items[i].last - part.items[i].first > part.num_sections() / 2) longest.push_back(i);
  }
  if (std::ssize(longest) * part.num_sections() > kMaxBaseWork) return base;
  std::ranges::stable_sort(longest, {}, [&](ItemId i) { return part.items[i].first - part.items[i].last; });
  std::vector<Bytes> load = part.section_load;
  for (const ItemId i : longest) {
    const Item& item = part.items[i];
    const auto fits = [&](Bytes other) { return other + item.size <= part.load; };
    const auto first = load.begin() + item.first, last = load.begin() + item.last;
    if (!std::all_of(load.begin(), first, fits) || !std::all_of(last, load.end(), fits)) continue;
    std::for_each(load.begin(), first, [&](Bytes& other) { other += item.size; });
    std::for_each(last, load.end(), [&](Bytes& other) { other += item.size; });
    base.offsets[i] = base.height;
    base.height += item.size;
  }
  return base;
}

bool births_repeat(const Part& part) {
  std::vector<std::uint64_t> births(part.section_load.size(), 0);  // of a section: a sum over what is born there
  for (const Item& item : part.items) {
    const std::uint64_t size = mixed(static_cast<std::uint64_t>(item.size));
    births[item.first] += mixed(size + static_cast<std::uint64_t>(item.last - item.first));
  }
  const std::size_t quarter = births.size() / 4, middle = births.size() - 2 * quarter;
  if (middle < 2 * kMinRepeats) return false;
  return least_period(std::span(births).subspan(quarter, middle)) <= middle / kMinRepeats;
}

Beam::Beam(const Part& part, const LongLivedBase& base, std::uint64_t seed) : part_(part), base_(base), random_(seed) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (base_.offsets[i] == kUnplaced) order_.push_back(i);
  }
  std::ranges::stable_sort(order_, {}, [&](ItemId i) {
    const Item& item = part.items[i];
    return std::tuple(item.first, -item.last, -item.size);
  });
  for (Section s = 0; s <= part.num_sections(); ++s) level_.push_back(std::sqrt(s));
  width_ = std::min(kFirstWidth, max_width());
}

void Beam::lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best) {
  const std::int64_t end = num_nodes_ + max_nodes;
  while (best.height > enough && num_nodes_ < end && !stop(best.height)) {
    if (target_ < 0 || target_ >= best.height) {
      const auto share = static_cast<Bytes>(kRungs[rung_] * static_cast<double>(best.height - enough));
      begin(best.height - std::max<Bytes>(1, share));
    }
    bool is_alive = true;
    while (is_alive && next_ < order_.size() && num_nodes_ < end && !stop(best.height)) is_alive = place();
    const bool has_reached = is_alive && next_ == order_.size();
    if (is_alive && !has_reached) return;
    if (has_reached) take_best(best);
    next_try(has_reached);
  }
}

void Beam::begin(Bytes target) {
  target_ = target;
  noise_ = kNoise[num_rounds_ % kNoise.size()];
  next_ = 0;
  states_.assign(1, {});
  steps_.clear();
}

// What succeeded is tried again from the new height. After the last rung, the search gets wider.
void Beam::next_try(bool has_reached) {
  target_ = -1;
  if (has_reached || ++rung_ < kRungs.size()) return;
  rung_ = 0;
  if (++num_rounds_ % kNoise.size() > 0) return;
  width_ = std::min(2 * width_, max_width());
}

std::size_t Beam::max_width() const {
  return std::clamp<std::size_t>(kMaxSteps / std::max<std::size_t>(1, order_.size()), 1, kMaxWidth);
}

// False where the next item has no room in any packing.
bool Beam::place() {
  const Item& item = part_.items[order_[next_]];
  const bool is_later = next_ == 0 || part_.items[order_[next_ - 1]].first < item.first;
  choices_.clear();
  for (std::size_t k = 0; k < states_.size(); ++k) {
    if (is_later) remove_ended(item.first, states_[k]);
    expand(static_cast<std::int32_t>(k), item);
    num_nodes_ += 1 + static_cast<std::int64_t>(states_[k].cells.size() / kCellsPerNode);
  }
  if (choices_.empty()) return false;
  select(item);
  ++next_;
  return true;
}

void Beam::remove_ended(Section now, State& state) {
  std::erase_if(state.cells, [&](const Cell& cell) {
    if (cell.death > now) return false;
    state.signature -= signature(cell);
    return true;
  });
}

void Beam::expand(std::int32_t state, const Item& item) {
  const auto& [cells, before] = states_[state];
  const Bytes capacity = target_ - base_.height;
  const auto level_of = [&](std::size_t cell) { return level_[cells[cell].death - item.first]; };
  const double own = level_[item.last - item.first];
  const std::size_t first_choice = choices_.size();
  double variation = 0;
  for (std::size_t k = 0; k <= cells.size(); ++k) {
    // The borders of memory add nothing: the hole next to one is broken up no further by it.
    const bool has_left = k > 0, has_right = k < cells.size();
    const Offset low = has_left ? cells[k - 1].last : 0, high = has_right ? cells[k].first : capacity;
    const double left = has_left ? level_of(k - 1) : 0, right = has_right ? level_of(k) : 0;
    if (high <= low) {
      if (has_left && has_right) variation += std::abs(left - right);
      continue;
    }
    variation += left + right;
    const auto add = [&](Offset offset, double change) {
      const Cell cell{offset, offset + item.size, item.last};
      change += noise_ * std::exponential_distribution<double>()(random_);
      choices_.push_back({change, state, static_cast<std::int32_t>(k), offset, before + signature(cell)});
    };
    const double beside_left = has_left ? std::abs(left - own) - left : 0,
                 beside_right = has_right ? std::abs(right - own) - right : 0;
    if (high - low == item.size) {
      add(low, beside_left + beside_right);
    } else if (high - low > item.size) {
      add(low, beside_left + own);
      add(high - item.size, beside_right + own);
    }
  }
  for (std::size_t k = first_choice; k < choices_.size(); ++k) choices_[k].cost += variation;
}

void Beam::select(const Item& item) {
  const auto by_cost = [](const Choice& a, const Choice& b) {
    return std::tuple(a.cost, a.state, a.offset) < std::tuple(b.cost, b.state, b.offset);
  };
  successors_.clear();
  std::vector<Step>& steps = steps_.emplace_back();
  std::unordered_set<std::uint64_t> seen;
  // The best ones are sorted, and more of them as long as too many were alike.
  for (auto from = choices_.begin(); from != choices_.end() && successors_.size() < width_;) {
    const auto to = from + std::min<std::ptrdiff_t>(choices_.end() - from, 2 * static_cast<std::ptrdiff_t>(width_));
    if (to != choices_.end()) std::nth_element(from, to, choices_.end(), by_cost);
    std::sort(from, to, by_cost);
    for (; from != to && successors_.size() < width_; ++from) {
      if (!seen.insert(from->signature).second) continue;
      const std::vector<Cell>& cells = states_[from->state].cells;
      State& successor = successors_.emplace_back();
      successor.cells.reserve(cells.size() + 1);
      successor.cells.assign(cells.begin(), cells.begin() + from->cell);
      successor.cells.push_back({from->offset, from->offset + item.size, item.last});
      successor.cells.insert(successor.cells.end(), cells.begin() + from->cell, cells.end());
      successor.signature = from->signature;
      steps.push_back({from->state, from->offset});
    }
  }
  std::swap(states_, successors_);
}

void Beam::take_best(Packing& best) const {
  best.offsets = base_.offsets;
  std::int32_t state = 0;
  for (std::size_t k = order_.size(); k-- > 0;) {
    const Step& step = steps_[k][state];
    best.offsets[order_[k]] = base_.height + step.offset;
    state = step.parent;
  }
  best.height = height_of(part_, best.offsets);
}

std::uint64_t Beam::signature(const Cell& cell) {
  return mixed(static_cast<std::uint64_t>(cell.first) +
               mixed(static_cast<std::uint64_t>(cell.last) + mixed(static_cast<std::uint64_t>(cell.death) + 1)));
}

}  // namespace olla
