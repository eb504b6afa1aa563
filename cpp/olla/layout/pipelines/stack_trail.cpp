#include "olla/layout/pipelines/stack_trail.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace olla {
namespace {

constexpr Section kShortSections = 4;  // an item alive in no more is short-lived
constexpr ItemId kMaxItems = 20'000;
constexpr std::size_t kMinStacks = 8, kMinStackItems = 3;        // items on average
constexpr std::size_t kMaxAlive = 64;                            // stacks: bits of a word
constexpr double kMaxSpare = 0.4;                                // of what is free
constexpr std::size_t kDivisions = 100, kMaxDivisions = 25'600;  // of a plan: at first, and at most
constexpr std::size_t kMoreDivisions = 4;                        // times as many after so many tries with nothing new
constexpr int kMaxStale = 100;
constexpr Bytes kTightShare = 4;                // of what there is to gain, when needs are judged
constexpr double kPromising = 0.5;              // share of tries with a hole that went far before
constexpr int kFirstShift = 3, kLastShift = 7;  // spare besides gaps: what is free, halved so often
constexpr std::int64_t kNodesPerTry = 20, kNodesToComplete = 100'000;

}  // namespace

std::unique_ptr<StackTrail> StackTrail::find(const Part& part, const Floor& floor, std::uint64_t seed) {
  if (!part.fixed.empty() || part.num_items() > kMaxItems) return nullptr;
  std::vector<Stack> stacks = find_stacks(part, floor, kShortSections);
  if (stacks.size() < kMinStacks) return nullptr;
  std::size_t num_items = 0;
  std::vector<std::int64_t> alive(part.section_load.size() + 1, 0);
  for (const Stack& stack : stacks) {
    num_items += stack.items.size();
    ++alive[stack.birth];
    --alive[stack.last_death];
  }
  if (num_items < kMinStackItems * stacks.size()) return nullptr;
  std::partial_sum(alive.begin(), alive.end(), alive.begin());
  if (std::ranges::max(alive) > static_cast<std::int64_t>(kMaxAlive)) return nullptr;
  return std::unique_ptr<StackTrail>(new StackTrail(part, floor, std::move(stacks), seed));
}

StackTrail::StackTrail(const Part& part, const Floor& floor, std::vector<Stack> stacks, std::uint64_t seed)
    : part_(part),
      floor_(floor),
      needs_(part, floor, std::move(stacks)),
      room_(part, needs_, seed),
      repair_(part),
      random_{mixed(seed + 1)},
      repair_random_(seed) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (floor_.offsets[i] != kUnplaced) continue;
    order_.push_back(i);
    unit_ = std::gcd(unit_, part.items[i].size);
  }
}

void StackTrail::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const std::function<bool()> asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  while (best.height > enough && num_nodes_ < end && !asked()) {
    if (best.height != height_) begin(best.height, enough);
    if (turns_.size() < 2) return;
    is_stale_ = true;
    attempt(asked, best);
    if (!is_stale_ || ++num_stale_ % kMaxStale != 0) continue;
    max_divisions_ *= kMoreDivisions;
    if (max_divisions_ <= kMaxDivisions) continue;
    plans_.clear();  // once more, with other divisions
    max_divisions_ = kDivisions;
  }
}

// What is tight, and the rooms where that begins.
void StackTrail::begin(Bytes height, Bytes enough) {
  height_ = height;
  most_planned_ = 0;
  promising_.clear();
  needs_.begin(height - (height - enough) / kTightShare - floor_.height);
  const StackId first = needs_.first_tight();
  room_.begin(first);
  if (first != first_) find_turns(first);
  base_ = floor_.height - least_more_;
  for (const StackId s : alive_) base_ += room_.bytes(s);
  // What a room may need: a gap, and something for sums that do not come out even.
  spares_.clear();
  const Bytes free = std::max<Bytes>(0, height - base_);
  for (const Bytes gap : needs_.gaps()) {
    spares_.push_back(gap);
    for (int shift = kFirstShift; shift <= kLastShift; ++shift) spares_.push_back(gap + (free >> shift) / unit_ * unit_);
  }
  std::ranges::sort(spares_);
  spares_.erase(std::ranges::unique(spares_).begin(), spares_.end());
}

// Which rooms there are, and in which order they get free.
void StackTrail::find_turns(StackId first) {
  first_ = first;
  alive_ = needs_.alive_with(first);
  const std::vector<Stack>& stacks = needs_.stacks();
  std::vector<StackId> born_in(stacks.size(), -1);  // the first one born where a stack was
  for (StackId s = static_cast<StackId>(stacks.size()) - 1; s >= 0; --s) {
    if (stacks[s].room >= 0) born_in[stacks[s].room] = s;
  }
  Bytes more = 0;
  least_more_ = 0;
  turns_.clear();
  std::vector<StackId> tenants = alive_;
  for (const StackId dies : needs_.deaths()) {
    if (stacks[dies].last_death <= stacks[first_].birth) continue;
    const auto tenant = std::ranges::find(tenants, dies);
    if (tenant == tenants.end()) break;  // it was not born in a room
    const StackId born = born_in[dies];
    turns_.push_back({static_cast<Room>(tenant - tenants.begin()), born, more});
    if (born < 0) break;
    *tenant = born;
    more += room_.bytes(dies) - room_.bytes(born);
    least_more_ = std::min(least_more_, more);
  }
  if (!turns_.empty()) turns_.back().born = -1;                          // where the hole goes then is not known
  if (!turns_.empty() && turns_.front().room == home()) turns_.clear();  // it cannot lie beside what has just been born
  plans_.clear();
  max_divisions_ = kDivisions;
  num_stale_ = 0;
}

void StackTrail::attempt(const std::function<bool()>& stop, Packing& best) {
  num_nodes_ += kNodesPerTry;
  walk();
  follow();
  const Bytes free = (best.height - 1 - base_) / unit_ * unit_;
  const bool again = !promising_.empty() && random_.chance(kPromising);
  hole_ = again ? promising_[random_.below(promising_.size())] : free - draw_spare(free);
  if (hole_ <= 0 || hole_ > free) return;
  Bytes spare = free - hole_;
  const std::size_t num_planned = plan_rooms(spare, stop);
  if (num_planned == alive_.size()) {
    if (!complete(base_ + hole_ + spare, stop, best)) chosen_[random_.below(chosen_.size())]->tenancies.clear();
    return;
  }
  if (num_planned > most_planned_) {
    most_planned_ = num_planned;
    promising_.clear();
  }
  if (num_planned == most_planned_ && std::ranges::find(promising_, hole_) == promising_.end()) promising_.push_back(hole_);
}

// Says how many of them have a plan, and what these leave unused. The room that is hardest comes last.
std::size_t StackTrail::plan_rooms(Bytes& spare, const std::function<bool()>& stop) {
  std::vector<Room> rooms(alive_.size());
  std::iota(rooms.begin(), rooms.end(), 0);
  std::ranges::stable_sort(rooms, {}, [&](Room r) { return slots_[r].size(); });
  chosen_.assign(rooms.size(), nullptr);
  Bytes used = 0;
  for (std::size_t k = 0; k < rooms.size(); ++k) {
    const Room room = rooms[k];
    for (const Bytes own : spares_) {
      if (used + own > spare || stop()) break;
      chosen_[room] = plan(room, own, stop);
      if (!chosen_[room]) continue;
      used += own;
      break;
    }
    if (!chosen_[room]) return k;
  }
  spare = used;
  return rooms.size();
}

// Along all pairs of rooms of which one gets free after the other, from the one to the other: Euler's trail, where there is one.
void StackTrail::walk() {
  const std::size_t num_rooms = alive_.size();
  std::vector<std::uint64_t> next(num_rooms, 0);  // rooms to go to
  std::vector<int> excess(num_rooms, 0);          // of ways out
  const auto add = [&](Room a, Room b) {
    const std::uint64_t bit = std::uint64_t{1} << b;
    if (a == b || (next[a] & bit) != 0 || (next[b] >> a & 1) != 0) return;
    next[a] |= bit;
    ++excess[a];
    --excess[b];
  };
  add(home(), turns_[0].room);
  for (std::size_t k = 1; k < turns_.size(); ++k) add(turns_[k - 1].room, turns_[k].room);
  std::vector<Room> starts(num_rooms), walked;
  std::iota(starts.begin(), starts.end(), 0);
  std::shuffle(starts.begin(), starts.end(), random_);
  std::ranges::stable_sort(starts, std::greater<>(), [&](Room r) { return excess[r]; });
  trail_.clear();
  for (const Room start : starts) {
    while (true) {
      const auto at = std::ranges::find(trail_, start);
      if (next[start] == 0 && at != trail_.end()) break;
      walked.assign(1, start);
      for (Room room = start; next[room] != 0;) {
        std::uint64_t others = next[room];
        const auto num_others = static_cast<std::size_t>(std::popcount(others));
        for (std::size_t skipped = random_.below(num_others); skipped > 0; --skipped) others &= others - 1;
        const auto to = static_cast<Room>(std::countr_zero(others));
        next[room] &= ~(std::uint64_t{1} << to);
        walked.push_back(room = to);
      }
      const bool is_round = at != trail_.end() && walked.back() == start;
      trail_.insert(is_round ? at : trail_.end(), walked.begin(), is_round ? walked.end() - 1 : walked.end());
    }
  }
  trail_.erase(std::ranges::unique(trail_).begin(), trail_.end());
  slots_.assign(num_rooms, {});
  for (Slot slot = 0; slot < trail_.size(); ++slot) slots_[trail_[slot]].push_back(slot);
}

// The lower slot of two rooms that lie side by side.
StackTrail::Slot StackTrail::pair(Room a, Room b) const {
  Slot found = 0;
  for (Slot slot = 0; slot + 1 < trail_.size(); ++slot) {
    if (trail_[slot] == a && trail_[slot + 1] == b) return slot;
    if (trail_[slot] == b && trail_[slot + 1] == a) found = slot;
  }
  return found;
}

// From pair to pair.
void StackTrail::follow() {
  visits_.clear();
  Slot at = start_ = pair(home(), turns_[0].room);
  for (std::size_t k = 0; k < turns_.size(); ++k) {
    const bool stays = turns_[k].born < 0 || turns_[k + 1].room == turns_[k].room;
    const Slot to = stays ? at : pair(turns_[k].room, turns_[k + 1].room);
    visits_.push_back({at, to});
    at = to;
  }
}

// As much for every room as one may need, and something more.
Bytes StackTrail::draw_spare(Bytes free) {
  const auto num_rooms = static_cast<Bytes>(alive_.size());
  const auto most = static_cast<Bytes>(kMaxSpare * static_cast<double>(free));
  const auto count = static_cast<std::size_t>(std::ranges::upper_bound(spares_, most / num_rooms) - spares_.begin());
  return num_rooms * spares_[random_.below(count)] + spares_[random_.below(count)];
}

// What the same room with the same visits got before; none where it is not found.
StackTrail::Plan* StackTrail::plan(Room room, Bytes spare, const std::function<bool()>& stop) {
  std::vector<Tenancy> tenancies = tenancies_of(room);
  std::uint64_t key = mixed(room + 1);
  const auto add = [&](std::uint64_t value) { key = mixed(key + value); };
  add(slots_[room].size());
  add(static_cast<std::uint64_t>(spare));
  add(static_cast<std::uint64_t>(hole_));
  for (const Tenancy& tenancy : tenancies) {
    for (const Tenancy::Hole& hole : {tenancy.birth, tenancy.death}) add(2 * static_cast<std::uint64_t>(hole.slot) + hole.is_low);
  }
  Plan& known = plans_[key];
  if (!known.tenancies.empty()) return &known;
  if (known.num_divisions >= max_divisions_) return nullptr;
  is_stale_ = false;
  const std::int64_t before = room_.num_nodes();
  const bool is_planned = room_.plan(tenancies, slots_[room].size(), spare, max_divisions_ - known.num_divisions, stop);
  num_nodes_ += room_.num_nodes() - before;
  known.num_divisions = max_divisions_;
  if (!is_planned) return nullptr;
  known.tenancies = std::move(tenancies);
  return &known;
}

// Where the hole is when stacks of a room are born and die.
std::vector<Tenancy> StackTrail::tenancies_of(Room room) const {
  std::vector<Tenancy> tenancies{{alive_[room], {}, {}, {}, {}}};
  const auto hole_at = [&](Slot lower, std::size_t turn) {
    const Slot slot = own(lower, room);
    const auto index = std::ranges::find(slots_[room], slot) - slots_[room].begin();
    return Tenancy::Hole{static_cast<Tenancy::SlotId>(index), slot != lower, hole(turn)};
  };
  if (room == home()) tenancies[0].birth = hole_at(start_, 0);
  for (std::size_t k = 0; k < turns_.size(); ++k) {
    if (turns_[k].room != room) continue;
    tenancies.back().death = hole_at(visits_[k].come, k);
    if (turns_[k].born >= 0) tenancies.push_back({turns_[k].born, hole_at(visits_[k].go, k + 1), {}, {}, {}});
  }
  return tenancies;
}

// Lays out the rooms as planned, and around them what is short-lived or died before.
bool StackTrail::complete(Bytes height, const std::function<bool()>& stop, Packing& best) {
  std::vector<Offset> offsets = floor_.offsets;
  std::vector<Bytes> widths(trail_.size());
  std::vector<std::size_t> num_placed(alive_.size(), 0);
  std::vector<Offset> base(trail_.size());
  const auto set_widths = [&](Room room) {
    const Tenancy& tenancy = chosen_[room]->tenancies[num_placed[room]];
    for (std::size_t k = 0; k < slots_[room].size(); ++k) widths[slots_[room][k]] = tenancy.widths[k];
  };
  const auto place = [&](Room room, Slot at, Bytes hole) {
    Offset low = floor_.height;
    for (Slot slot = 0; slot < trail_.size(); ++slot) {
      base[slot] = low;
      low += widths[slot] + (slot == at ? hole : 0);
    }
    for (const auto& [slot, above, item] : chosen_[room]->tenancies[num_placed[room]++].places) {
      offsets[item] = base[slots_[room][static_cast<std::size_t>(slot)]] + above;
    }
  };
  for (Room room = 0; room < alive_.size(); ++room) set_widths(room);
  for (Room room = 0; room < alive_.size(); ++room) place(room, start_, hole(0));
  for (std::size_t k = 0; turns_[k].born >= 0; ++k) {
    set_widths(turns_[k].room);
    place(turns_[k].room, visits_[k].go, hole(k + 1));
  }
  const std::int64_t before = repair_.num_nodes();
  const bool fits = repair_.extend(order_, height, {kNodesToComplete, stop}, repair_random_, offsets);
  num_nodes_ += repair_.num_nodes() - before;
  if (!fits) return false;
  best.offsets = std::move(offsets);
  best.height = height_of(part_, best.offsets);
  return true;
}

}  // namespace olla
