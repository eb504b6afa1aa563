#include "olla/skyline.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <numeric>
#include <tuple>

namespace olla {
namespace {

constexpr std::int32_t kItemsPerLeaf = 4;
constexpr std::int64_t kWorkPerPlacement = 64, kWorkPerQuestion = 4096 * kWorkPerPlacement;  // one for every item scanned
constexpr std::size_t kMaxOpen = 80;  // a depth-first walk keeps one node per level aside

std::int32_t leaves_for(std::size_t count) { return static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(count))); }

}  // namespace

ItemPool::ItemPool(const Part& part)
    : part_(part),
      num_leaves_(leaves_for(part.items.size() / kItemsPerLeaf + 1)),
      best_(2 * num_leaves_),
      item_(part.items.size()),
      rank_(part.items.size()),
      slot_(part.items.size()) {
  std::iota(item_.begin(), item_.end(), 0);
  sort_into_leaves();
  for (std::size_t slot = 0; slot < item_.size(); ++slot) slot_[item_[slot]] = static_cast<std::int32_t>(slot);
  bound_nodes();
}

std::int32_t ItemPool::first_slot(std::int32_t leaf) const {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(leaf) * std::ssize(item_) / num_leaves_);
}

// Halves the items of every node, by first and by last in turn, level by level.
void ItemPool::sort_into_leaves() {
  const auto by_first = [this](ItemId i) { return std::tuple(part_.items[i].first, part_.items[i].last, i); };
  const auto by_last = [this](ItemId i) { return std::tuple(part_.items[i].last, part_.items[i].first, i); };
  bool use_first = true;
  for (std::int32_t width = num_leaves_; width > 1; width /= 2, use_first = !use_first) {
    for (std::int32_t leaf = 0; leaf < num_leaves_; leaf += width) {
      const auto begin = item_.begin() + first_slot(leaf), end = item_.begin() + first_slot(leaf + width);
      const auto middle = item_.begin() + first_slot(leaf + width / 2);
      if (use_first) {
        std::ranges::nth_element(begin, middle, end, {}, by_first);
      } else {
        std::ranges::nth_element(begin, middle, end, {}, by_last);
      }
    }
  }
}

void ItemPool::bound_nodes() {
  constexpr Section kFar = std::numeric_limits<Section>::max();
  box_.assign(2 * num_leaves_, Box{kFar, -1, kFar, -1});
  for (std::int32_t k = 2 * num_leaves_ - 1; k > 0; --k) {
    Box& box = box_[k];
    const auto include = [&box](const Box& other) {
      box = {std::min(box.min_first, other.min_first), std::max(box.max_first, other.max_first),
             std::min(box.min_last, other.min_last), std::max(box.max_last, other.max_last)};
    };
    if (k < num_leaves_) {
      include(box_[2 * k]);
      include(box_[2 * k + 1]);
      continue;
    }
    for (std::int32_t slot = first_slot(k - num_leaves_); slot < first_slot(k - num_leaves_ + 1); ++slot) {
      const Item& item = part_.items[item_[slot]];
      include({item.first, item.first, item.last, item.last});
    }
  }
}

void ItemPool::fill(std::span<const ItemId> order) {
  for (std::size_t r = 0; r < order.size(); ++r) rank_[slot_[order[r]]] = static_cast<std::int32_t>(r);
  for (std::int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
    std::int32_t& best = best_[num_leaves_ + leaf];
    best = kNoRank;
    for (std::int32_t slot = first_slot(leaf); slot < first_slot(leaf + 1); ++slot) best = std::min(best, rank_[slot]);
  }
  for (std::int32_t k = num_leaves_ - 1; k > 0; --k) best_[k] = std::min(best_[2 * k], best_[2 * k + 1]);
}

std::int32_t ItemPool::best(const Box& within, std::int32_t after) const {
  std::array<std::int32_t, kMaxOpen> open;
  std::size_t num_open = 0;
  open[num_open++] = 1;
  std::int32_t best = kNoRank;
  while (num_open > 0) {
    const std::int32_t k = open[--num_open];
    const Box& box = box_[k];
    if (best_[k] >= best || box.max_first < within.min_first || box.min_first > within.max_first ||
        box.max_last < within.min_last || box.min_last > within.max_last) {
      continue;
    }
    if (box.min_first >= within.min_first && box.max_first <= within.max_first && box.min_last >= within.min_last &&
        box.max_last <= within.max_last && best_[k] > after) {
      best = best_[k];
    } else if (k < num_leaves_) {
      const std::int32_t better = best_[2 * k] < best_[2 * k + 1] ? 2 * k : 2 * k + 1;
      open[num_open++] = better ^ 1;
      open[num_open++] = better;
    } else {
      for (std::int32_t slot = first_slot(k - num_leaves_); slot < first_slot(k - num_leaves_ + 1); ++slot) {
        const Item& item = part_.items[item_[slot]];
        if (item.first >= within.min_first && item.first <= within.max_first && item.last >= within.min_last &&
            item.last <= within.max_last && rank_[slot] > after) {
          best = std::min(best, rank_[slot]);
        }
      }
    }
  }
  return best;
}

void ItemPool::remove(ItemId item) {
  const std::int32_t slot = slot_[item];
  const std::int32_t removed = rank_[slot];
  rank_[slot] = kNoRank;
  auto leaf = static_cast<std::int32_t>(static_cast<std::int64_t>(slot) * num_leaves_ / std::ssize(item_));
  while (first_slot(leaf + 1) <= slot) ++leaf;  // the quotient is rounded down
  std::int32_t k = num_leaves_ + leaf;
  if (best_[k] != removed) return;
  best_[k] = *std::min_element(rank_.begin() + first_slot(leaf), rank_.begin() + first_slot(leaf + 1));
  for (k /= 2; k > 0 && best_[k] == removed; k /= 2) best_[k] = std::min(best_[2 * k], best_[2 * k + 1]);
}

SectionReach::SectionReach(std::span<const Bytes> section_load)
    : num_leaves_(leaves_for(section_load.size())), top_(2 * num_leaves_, 0), added_(2 * num_leaves_, 0) {
  std::ranges::copy(section_load, top_.begin() + num_leaves_);
  for (Section k = num_leaves_ - 1; k > 0; --k) top_[k] = std::max(top_[2 * k], top_[2 * k + 1]);
}

void SectionReach::raise(Section first, Section last, Bytes bytes) {
  const Section from = first + num_leaves_, to = last + num_leaves_;
  const auto add = [&](Section k) {
    top_[k] += bytes;
    added_[k] += bytes;
  };
  for (Section l = from, r = to; l < r; l /= 2, r /= 2) {
    if (l % 2 == 1) add(l++);
    if (r % 2 == 1) add(--r);
  }
  for (const Section leaf : {from, to - 1}) {
    for (Section k = leaf / 2; k > 0; k /= 2) top_[k] = std::max(top_[2 * k], top_[2 * k + 1]) + added_[k];
  }
}

Bytes SectionReach::at(Section section) const {
  Section k = section + num_leaves_;
  Bytes reach = top_[k];
  for (k /= 2; k > 0; k /= 2) reach += added_[k];
  return reach;
}

std::pair<Bytes, Section> SectionReach::highest(Section first, Section last, Bytes above_bytes) const {
  struct Node {
    Section k, begin, width;
    Bytes above;  // additions of the nodes above
  };
  std::array<Node, kMaxOpen> open;
  std::size_t num_open = 0;
  open[num_open++] = {1, 0, num_leaves_, 0};
  Bytes highest = above_bytes;
  Section where = -1;
  while (num_open > 0) {
    const auto [k, begin, width, above] = open[--num_open];
    if (begin >= last || begin + width <= first || top_[k] + above <= highest) continue;
    if (begin >= first && begin + width <= last) {
      highest = top_[k] + above;
      Section leaf = k;
      while (leaf < num_leaves_) leaf = 2 * leaf + (top_[2 * leaf] == top_[leaf] - added_[leaf] ? 0 : 1);
      where = leaf - num_leaves_;
    } else {
      open[num_open++] = {2 * k + 1, begin + width / 2, width / 2, above + added_[k]};
      open[num_open++] = {2 * k, begin, width / 2, above + added_[k]};
    }
  }
  return {highest, where};
}

Skyline::Skyline(const Part& part)
    : part_(part),
      pool_(part),
      reach_(part.section_load),
      end_(part.section_load.size()),
      before_(part.section_load.size()),
      height_(part.section_load.size()),
      born_before_(born_before(part)) {}

void Skyline::set_segment(Section before, Section first, Section last, Bytes height) {
  before_[first] = before;
  end_[first] = last;
  height_[first] = height;
  if (last < part_.num_sections()) before_[last] = first;
}

// Joins the segment with neighbours of its height; returns where the joint segment begins.
Section Skyline::merge(Section first) {
  const Section right = end_[first];
  if (right < part_.num_sections() && height_[right] == height_[first]) {
    set_segment(before_[first], first, end_[right], height_[first]);
    end_[right] = 0;
  }
  const Section left = before_[first];
  if (left < 0 || height_[left] != height_[first]) return first;
  set_segment(before_[left], left, end_[first], height_[first]);
  end_[first] = 0;
  return left;
}

std::int32_t Skyline::choose(Section first, Section last) {
  const ItemPool::Box inside{first, last - 1, first + 1, last};
  if (!is_watched_) return pool_.best(inside);
  int num_looks = std::max(1, rules_.num_looks);
  const auto first_allowed = [&](const ItemPool::Box& box, Section except) {
    for (std::int32_t rank = pool_.best(box); rank != kNoRank && num_looks > 0; rank = pool_.best(box, rank)) {
      const Item& item = part_.items[order_[rank]];
      if (item.first <= except && except < item.last) continue;
      --num_looks;
      if (rules_.num_looks == 0 || !walls_in(order_[rank], height_[first] + item.size)) return rank;
    }
    return kNoRank;
  };
  const Section highest = reach_.highest(first, last).second;
  const std::int32_t rank = first_allowed({first, highest, highest + 1, last}, -1);
  return rank != kNoRank ? rank : first_allowed(inside, highest);
}

// Whether the item, put into a valley up to top, walls in a section beside it: goes outwards from wall to higher wall.
bool Skyline::walls_in(ItemId item, Bytes top) {
  const auto [first, last, size] = part_.items[item];
  Section valley = first;
  while (end_[valley] == 0) --valley;
  Bytes wall = top - size;
  for (Section left = first, next = valley < first ? valley : before_[valley]; wall < top;) {
    const Bytes height = next < 0 ? top : std::min(top, height_[next]);
    if (height > wall && underfills(left, first, height)) return true;
    wall = std::max(wall, height);
    left = next;
    next = next < 0 ? next : before_[next];
  }
  wall = top - size;
  for (Section right = last; wall < top;) {
    const Section next = right == last && last < end_[valley] ? valley : right;
    const Bytes height = next == part_.num_sections() ? top : std::min(top, height_[next]);
    if (height > wall && underfills(last, right, height)) return true;
    wall = std::max(wall, height);
    right = next == part_.num_sections() ? next : end_[next];
  }
  return false;
}

// Whether the items to come inside [first, last) leave a section there so far below top that it ends above the target.
bool Skyline::underfills(Section first, Section last, Bytes top) {
  if (first >= last) return false;
  bool tight = false;
  Section begin = first;
  while (end_[begin] == 0) --begin;
  for (Section s = begin; s < last && !tight; s = end_[s]) {
    tight = reach_.highest(std::max(s, first), std::min(end_[s], last), rules_.target - top + height_[s]).second >= 0;
  }
  if (!tight) return false;
  change_.assign(last - first + 1, 0);
  work_ += born_before_[last] - born_before_[first];
  for (ItemId i = born_before_[first]; i < born_before_[last]; ++i) {
    const Item& item = part_.items[i];
    if (item.last > last || offsets_[i] != kUnplaced) continue;
    change_[item.first - first] += item.size;
    change_[item.last - first] -= item.size;
  }
  Bytes inside = 0;
  for (Section s = first, segment = begin; s < last; ++s) {
    if (s >= end_[segment]) segment = s;
    inside += change_[s - first];
    if (top - height_[segment] - inside + reach_.at(s) <= rules_.target) continue;
    culprit_ = s;
    return true;
  }
  return false;
}

// Puts the item on the valley [first, last) and cuts the valley around it.
void Skyline::put(const Item& item, Section first, Section last) {
  const Bytes floor = height_[first];
  const auto push = [this](Valley valley) {
    valleys_.push_back(valley);
    std::ranges::push_heap(valleys_, std::greater<>());
  };
  Section before = before_[first];
  if (first < item.first) {
    end_[first] = item.first;
    before = first;
  }
  if (item.last < last) {
    set_segment(item.first, item.last, last, floor);
    push({floor, item.last});
  }
  set_segment(before, item.first, item.last, floor + item.size);
  push({floor + item.size, merge(item.first)});
}

// Raises the valley to its lower neighbour; returns where the joint segment begins.
Section Skyline::raise(Section first) {
  const Section last = end_[first];
  Bytes to = std::numeric_limits<Bytes>::max();
  if (first > 0) to = height_[before_[first]];
  if (last < part_.num_sections()) to = std::min(to, height_[last]);
  height_[first] = to;
  return merge(first);
}

void Skyline::begin(std::span<const ItemId> order, const SkylineRules& rules, Packing& packing) {
  order_ = order;
  rules_ = rules;
  is_watched_ = rules.target < SkylineRules().target;
  if (is_watched_) reach_ = SectionReach(part_.section_load);
  pool_.fill(order);
  packing.height = 0;
  packing.offsets.assign(part_.items.size(), kUnplaced);
  offsets_ = packing.offsets.data();
  culprit_ = -1;
  work_ = 0;
  std::ranges::fill(end_, 0);
  set_segment(-1, 0, part_.num_sections(), 0);
  valleys_.assign(1, {0, 0});
}

bool Skyline::place(std::span<const ItemId> order, const SkylineRules& rules, const std::function<bool()>& stop, Packing& packing) {
  begin(order, rules, packing);
  for (std::size_t num_placed = 0; num_placed < order.size();) {
    const Valley valley = valleys_.front();
    const Section first = valley.first, last = end_[first];
    const std::int32_t rank = is_current(valley) ? choose(first, last) : kNoRank;
    if (rank != kNoRank) {
      const ItemId item = order[rank];
      packing.offsets[item] = valley.height;
      packing.height = std::max(packing.height, valley.height + part_.items[item].size);
      pool_.remove(item);
      put(part_.items[item], first, last);
      ++num_placed;
      work_ += kWorkPerPlacement;
      if (work_ < kWorkPerQuestion) continue;
      work_ = 0;
      if (stop()) return false;
      continue;
    }
    const bool raised = is_current(valley);
    std::ranges::pop_heap(valleys_, std::greater<>());
    valleys_.pop_back();
    if (!raised) continue;
    if (first == 0 && last == part_.num_sections()) return false;  // whatever comes next walls in the culprit
    const Section joint = raise(first);
    valleys_.push_back({height_[joint], joint});
    std::ranges::push_heap(valleys_, std::greater<>());
    if (!is_watched_) continue;
    reach_.raise(first, last, height_[joint] - valley.height);
    const auto [reach, section] = reach_.highest(first, last);
    if (reach <= rules.target) continue;
    culprit_ = section;
    return false;
  }
  return true;
}

void Skyline::stack_rest(Packing& packing) const {
  std::map<Section, Bytes> tops;  // of the segment that begins there
  for (Section s = 0; s < part_.num_sections(); s = end_[s]) tops[s] = height_[s];
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (packing.offsets[i] != kUnplaced) continue;
    const auto [first, last, size] = part_.items[i];
    auto segment = std::prev(tops.upper_bound(first));
    Bytes top = 0, after = 0;
    for (; segment != tops.end() && segment->first < last;
         segment = segment->first < first ? std::next(segment) : tops.erase(segment)) {
      after = segment->second;
      top = std::max(top, after);
    }
    if (last < part_.num_sections()) tops.emplace(last, after);
    tops[first] = top + size;
    packing.offsets[i] = top;
    packing.height = std::max(packing.height, top + size);
  }
}

}  // namespace olla
