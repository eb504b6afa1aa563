#include "olla/layout/greedy/skyline.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <map>

namespace olla {
namespace {

constexpr std::int64_t kWorkPerPlacement = 64, kWorkPerQuestion = 4096 * kWorkPerPlacement;  // one for every item scanned
constexpr std::size_t kMaxOpen = 80;  // a depth-first walk keeps one node per level aside
constexpr int kMaxMisfits = 64;       // items tried in a valley that do not fit below a fixed item; then it is raised

constexpr Bytes kNoCeiling = std::numeric_limits<Bytes>::max();

std::int32_t leaves_for(std::size_t count) { return static_cast<std::int32_t>(std::bit_ceil(static_cast<std::uint32_t>(count))); }

}  // namespace

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
      fixed_items_(part),
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
  if (!is_watched_ && fixed_items_.empty()) return pool_.best(inside);
  const Bytes floor = height_[first];
  const Offset ceiling = fixed_items_.empty() ? kNoCeiling : fixed_items_.next(first, last).offset;
  const auto fits = [&](const Item& item) {
    return item.size <= ceiling - floor || item.size <= fixed_items_.next(item.first, item.last).offset - floor;
  };
  int num_looks = std::max(1, rules_.num_looks), num_misfits = 0;
  const auto first_allowed = [&](const ItemPool::Box& box, Section except) {
    walk_.start(pool_, box);
    for (std::int32_t rank = walk_.next(); rank != kNoRank && num_looks > 0; rank = walk_.next()) {
      const Item& item = part_.items[order_[rank]];
      if (item.first <= except && except < item.last) continue;
      if (!fits(item)) {
        if (++num_misfits == kMaxMisfits) break;
        continue;
      }
      --num_looks;
      if (rules_.num_looks == 0 || !walls_in(order_[rank], floor + item.size)) return rank;
    }
    return kNoRank;
  };
  if (!is_watched_) return first_allowed(inside, -1);
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
  if (!fixed_items_.empty()) count_fixed(first, last, top);
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

// Adds to change_ the fixed items below top, also where the skyline has passed them, which only weakens the test.
void Skyline::count_fixed(Section first, Section last, Bytes top) {
  fixed_items_.each(first, last, [&](const FixedItems::FixedItem& next) {
    const Bytes below = std::min(next.item.size, top - next.offset);
    if (below <= 0) return false;
    change_[std::max(next.item.first, first) - first] += below;
    change_[std::min(next.item.last, last) - first] -= below;
    work_ += kWorkPerPlacement;
    return true;
  });
}

// Puts the item on the valley [first, last) and cuts the valley around it.
void Skyline::put(const Item& item, Section first, Section last) {
  const Bytes floor = height_[first];
  Section before = before_[first];
  if (first < item.first) {
    end_[first] = item.first;
    before = first;
  }
  if (item.last < last) {
    set_segment(item.first, item.last, last, floor);
    valleys_.push({floor, item.last});
  }
  set_segment(before, item.first, item.last, floor + item.size);
  valleys_.push({floor + item.size, merge(item.first)});
}

// Raises the valley to its lower neighbour, or the fixed item above it; returns where the joint segment begins, -1 if neither is
// there.
Section Skyline::raise(Section first) {
  const Section last = end_[first];
  Bytes to = fixed_items_.empty() ? kNoCeiling : fixed_items_.next(first, last).offset;
  if (first > 0) to = std::min(to, height_[before_[first]]);
  if (last < part_.num_sections()) to = std::min(to, height_[last]);
  if (to == kNoCeiling) return -1;
  height_[first] = to;
  return merge(first);
}

// Builds over a fixed item that the valley has risen to.
bool Skyline::pass_fixed(Section first, Section last) {
  if (fixed_items_.empty()) return false;
  const auto [offset, item, rank] = fixed_items_.next(first, last);
  if (offset != height_[first]) return false;
  put({std::max(first, item.first), std::min(last, item.last), item.size}, first, last);
  return true;
}

void Skyline::begin(std::span<const ItemId> order, const SkylineRules& rules, Packing& packing) {
  order_ = order;
  rules_ = rules;
  is_watched_ = rules.target < SkylineRules().target;
  if (is_watched_) reach_ = SectionReach(part_.section_load);
  pool_.fill(order);
  fixed_items_.restore();
  packing.height = 0;
  packing.offsets.assign(part_.items.size(), kUnplaced);
  for (ItemId i = 0; i < std::ssize(part_.fixed); ++i) {
    packing.offsets[i] = part_.fixed[i];
    if (part_.is_fixed(i)) packing.height = std::max(packing.height, part_.fixed[i] + part_.items[i].size);
  }
  offsets_ = packing.offsets.data();
  culprit_ = -1;
  work_ = 0;
  std::ranges::fill(end_, 0);
  set_segment(-1, 0, part_.num_sections(), 0);
  valleys_ = {};
  valleys_.push({0, 0});
}

bool Skyline::place(std::span<const ItemId> order, const SkylineRules& rules, const std::function<bool()>& stop, Packing& packing) {
  begin(order, rules, packing);
  for (std::size_t num_placed = 0; num_placed < order.size();) {
    const Valley valley = valleys_.top();
    const Section first = valley.first, last = end_[first];
    fixed_items_.leave_below(valley.height);
    if (is_current(valley) && pass_fixed(first, last)) continue;
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
    valleys_.pop();
    if (!raised) continue;
    const Section joint = raise(first);
    if (joint < 0) return false;  // whatever comes next walls in the culprit
    valleys_.push({height_[joint], joint});
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
  const auto stack = [&](const Item& item, Bytes least) {
    auto segment = std::prev(tops.upper_bound(item.first));
    Bytes top = least, after = 0;
    for (; segment != tops.end() && segment->first < item.last;
         segment = segment->first < item.first ? std::next(segment) : tops.erase(segment)) {
      after = segment->second;
      top = std::max(top, after);
    }
    if (item.last < part_.num_sections()) tops.emplace(item.last, after);
    tops[item.first] = top;
    return tops.find(item.first);
  };
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (part_.is_fixed(i)) stack(part_.items[i], part_.fixed[i] + part_.items[i].size);
  }
  for (ItemId i = 0; i < part_.num_items(); ++i) {
    if (packing.offsets[i] != kUnplaced) continue;
    const auto segment = stack(part_.items[i], 0);
    packing.offsets[i] = segment->second;
    segment->second += part_.items[i].size;
    packing.height = std::max(packing.height, segment->second);
  }
}

}  // namespace olla
