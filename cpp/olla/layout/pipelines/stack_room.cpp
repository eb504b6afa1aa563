#include "olla/layout/pipelines/stack_room.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace olla {
namespace {

constexpr std::size_t kMaxSmall = 10;                   // items of a stack of which all sums are known
constexpr double kSmallSlot = 0.8, kToSmallSlot = 0.2;  // shares of divisions with one, and of items that may go there
constexpr std::size_t kDivisionsPerStop = 64, kNewChoices = 4;
constexpr int kMaxSums = 2000;                      // tried for one stack, at a time
constexpr int kMaxIdle = 30, kMaxChoiceTries = 10;  // of a choice that never did
constexpr double kExplore = 0.25;                   // how often they are tried where others did before
constexpr double kNoGap = 0.3;

}  // namespace

StackRoom::StackRoom(const Part& part, const StackNeeds& needs, std::uint64_t seed)
    : part_(part), needs_(needs), fit_(part), random_{mixed(seed + 1)} {}

void StackRoom::begin(StackId first) {
  const std::vector<Stack>& stacks = needs_.stacks();
  items_.assign(stacks.size(), {});
  kinds_of_.assign(stacks.size(), 0);
  tight_.assign(stacks.size(), {});
  bytes_.assign(stacks.size(), 0);
  for (StackId s = 0; s < std::ssize(stacks); ++s) {
    for (const ItemId i : stacks[s].items) {
      if (s <= first && part_.items[i].last <= stacks[first].birth) continue;
      items_[s].push_back(i);
      bytes_[s] += size_of(i);
    }
    if (items_[s].empty()) continue;
    kinds_of_[s] = kind_of(items_[s]);
    const Section last_birth = part_.items[items_[s].back()].first;
    std::ranges::copy_if(needs_.tight(s), std::back_inserter(tight_[s]),
                         [&](ItemId i) { return part_.items[i].first < last_birth; });
  }
}

// Once found, for good.
std::size_t StackRoom::kind_of(const std::vector<ItemId>& items) {
  std::vector<Bytes> sizes;
  for (const ItemId i : items) sizes.push_back(size_of(i));
  const auto [known, is_new] = kinds_by_sizes_.try_emplace(sizes, kinds_.size());
  if (!is_new) return known->second;
  Kind& kind = kinds_.emplace_back();
  kind.large.resize(items.size() - 1);
  std::iota(kind.large.begin(), kind.large.end(), 0);
  std::ranges::stable_sort(kind.large, std::greater<>(), [&](std::size_t k) { return sizes[k]; });
  const auto num_large = static_cast<std::ptrdiff_t>(kind.large.size() - std::min(kind.large.size(), kMaxSmall));
  kind.small.assign(kind.large.begin() + num_large, kind.large.end());
  kind.large.resize(static_cast<std::size_t>(num_large));
  kind.sums.resize(std::size_t{1} << kind.small.size());
  for (std::uint32_t set = 1; set < kind.sums.size(); ++set) {
    const std::uint32_t others = set & (set - 1);
    kind.sums[set] = {kind.sums[others].bytes + sizes[kind.small[static_cast<std::size_t>(std::countr_zero(set))]], set};
  }
  std::ranges::sort(kind.sums, {}, &Kind::Sum::bytes);
  return kinds_.size() - 1;
}

bool StackRoom::plan(std::vector<Tenancy>& tenancies, std::size_t num_slots, Bytes spare, std::size_t max_divisions,
                     const std::function<bool()>& stop) {
  std::vector<std::vector<Choice>> choices(tenancies.size());
  std::vector<std::size_t> order(tenancies.size());  // what failed last comes first
  std::iota(order.begin(), order.end(), 0);
  int num_idle = 0;
  for (; max_divisions > 0; --max_divisions) {
    if (max_divisions % kDivisionsPerStop == 0 && stop()) return false;
    ++num_nodes_;
    tenancies[0].widths.assign(num_slots, 0);
    divide(tenancies[0].stack, spare, tenancies[0].widths);
    if (!pass_on_widths(tenancies, spare)) continue;
    const std::int64_t before = num_fills_;
    const auto failed = std::ranges::find_if(order, [&](std::size_t k) { return !settle(tenancies[k], choices[k], spare); });
    if (failed == order.end()) return true;
    std::rotate(order.begin(), failed, failed + 1);
    num_idle = num_fills_ == before ? num_idle + 1 : 0;
    if (num_idle == kMaxIdle) return false;  // a stack that never fits
  }
  return false;
}

// Mostly one of the slots gets little, or nothing: few sums have to come out even then.
void StackRoom::divide(StackId stack, Bytes spare, std::vector<Bytes>& widths) {
  const std::size_t num_slots = widths.size();
  const std::size_t small = num_slots > 1 && random_.chance(kSmallSlot) ? random_.below(num_slots) : num_slots;
  const auto any_slot = [&] {
    if (small == num_slots || random_.chance(kToSmallSlot)) return random_.below(num_slots);
    const std::size_t slot = random_.below(num_slots - 1);
    return slot < small ? slot : slot + 1;
  };
  for (const ItemId i : items_[stack]) widths[any_slot()] += size_of(i);
  const Bytes gap = std::min(spare, a_gap());
  widths[random_.below(num_slots)] += gap;
  widths[random_.below(num_slots)] += spare - gap;
}

// How wide the slots are for each stack: only the host's changes, by the hole.
bool StackRoom::pass_on_widths(std::vector<Tenancy>& tenancies, Bytes spare) const {
  for (std::size_t k = 1; k < tenancies.size(); ++k) {
    const Tenancy& before = tenancies[k - 1];
    Tenancy& tenancy = tenancies[k];
    tenancy.widths = before.widths;
    tenancy.widths[before.death.slot] += before.death.bytes;
    Bytes& host = tenancy.widths[host_of(tenancy)];
    host += bytes_[tenancy.stack] + spare - std::accumulate(tenancy.widths.begin(), tenancy.widths.end(), Bytes{0});
    if (host < 0) return false;
  }
  return true;
}

// What is born last, and so dies first, lies in the host, or where the hole is when it dies, perhaps with a gap beside it: room for
// what is tight before it is born.
bool StackRoom::settle(Tenancy& tenancy, std::vector<Choice>& choices, Bytes spare) {
  const auto lays = [&](Choice& choice) {
    ++num_fills_;
    if (!fill(tenancy, choice, spare)) return false;
    ++choice.num_tries;
    const bool is_laid = lay(tenancy, choice.gap);
    choice.has_done = choice.has_done || is_laid;
    return is_laid;
  };
  bool has_any = false;
  for (Choice& choice : choices) {
    if (!choice.has_done) continue;
    has_any = true;
    if (lays(choice)) return true;
  }
  for (std::size_t left = !has_any || random_.chance(kExplore) ? kNewChoices : 0; left > 0; --left) {
    const SlotId host = host_of(tenancy), entered = tenancy.death.slot >= 0 ? tenancy.death.slot : host;
    const SlotId slot = random_.chance(0.5) ? host : entered;
    const Bytes gap = random_.chance(kNoGap) ? 0 : std::min(spare, a_gap());
    auto choice = std::ranges::find_if(choices, [&](const Choice& c) { return c.slot == slot && c.gap == gap; });
    if (choice == choices.end()) choice = choices.insert(choice, {slot, gap});
    if (!choice->has_done && choice->num_tries < kMaxChoiceTries && lays(*choice)) return true;
  }
  return false;
}

// Whether it fits with what is short-lived.
bool StackRoom::lay(Tenancy& tenancy, Bytes gap) {
  arrange(tenancy, gap);
  return fits(tenancy, tenancy.birth, tight_[tenancy.stack]) && fits(tenancy, tenancy.death, needs_.last_tight(tenancy.stack));
}

// Gives items to slots, so that no more than is to spare stays free in all of them but the host's: large ones at random, and small
// ones by their sums.
bool StackRoom::fill(const Tenancy& tenancy, const Choice& choice, Bytes spare) {
  const SlotId host = host_of(tenancy);
  const std::vector<ItemId>& items = items_[tenancy.stack];
  const Kind& kind = kinds_[kinds_of_[tenancy.stack]];
  slots_.assign(items.size(), host);
  slots_.back() = choice.slot;
  left_ = tenancy.widths;
  if (choice.slot != host) {
    left_[choice.slot] -= size_of(items.back()) + choice.gap;
    spare -= choice.gap;
  }
  for (const std::size_t k : kind.large) {
    const auto slot = static_cast<SlotId>(random_.below(left_.size()));
    const Bytes size = size_of(items[k]);
    if (slot == host || left_[slot] < size) continue;
    left_[slot] -= size;
    slots_[k] = slot;
  }
  small_.assign(left_.size(), 0);
  num_sums_left_ = kMaxSums;
  if (!fill_from(0, kind, host, 0, spare)) return false;
  for (SlotId slot = 0; slot < std::ssize(left_); ++slot) {
    for (std::uint32_t set = small_[slot]; set != 0; set &= set - 1) {
      slots_[kind.small[static_cast<std::size_t>(std::countr_zero(set))]] = slot;
    }
  }
  return true;
}

// Goes no deeper than there are slots.
bool StackRoom::fill_from(SlotId slot, const Kind& kind, SlotId host, std::uint32_t taken, Bytes spare) {
  if (slot == host) ++slot;
  if (slot == std::ssize(left_)) return true;
  const auto first = std::ranges::lower_bound(kind.sums, left_[slot] - spare, {}, &Kind::Sum::bytes);
  const auto last = std::ranges::upper_bound(first, kind.sums.end(), left_[slot], {}, &Kind::Sum::bytes);
  const auto count = static_cast<std::size_t>(last - first);
  if (count == 0) return false;
  ++num_nodes_;
  const std::size_t start = random_.below(count);
  for (std::size_t k = 0; k < count && num_sums_left_ > 0; ++k) {
    --num_sums_left_;
    const Kind::Sum& sum = *(first + static_cast<std::ptrdiff_t>((start + k) % count));
    if ((sum.items & taken) != 0) continue;
    small_[slot] = sum.items;
    if (fill_from(slot + 1, kind, host, taken | sum.items, spare - (left_[slot] - sum.bytes))) return true;
  }
  return false;
}

// The last born of a slot at the end where the hole is: when it is born, or when it dies.
void StackRoom::arrange(Tenancy& tenancy, Bytes gap) {
  const std::vector<ItemId>& items = items_[tenancy.stack];
  tenancy.places.clear();
  left_ = tenancy.widths;
  for (std::size_t k = 0; k < items.size(); ++k) left_[slots_[k]] -= size_of(items[k]);
  for (SlotId slot = 0; slot < std::ssize(tenancy.widths); ++slot) {
    const bool is_host = tenancy.birth.slot == slot, is_entered = tenancy.death.slot == slot;
    bool is_low = random_.chance(0.5);
    if (is_host && (!is_entered || random_.chance(0.5))) {
      is_low = tenancy.birth.is_low;
    } else if (is_entered) {
      is_low = tenancy.death.is_low;
    }
    Bytes from_end = 0;
    for (std::size_t k = items.size(); k-- > 0;) {
      if (slots_[k] != slot) continue;
      const Bytes size = size_of(items[k]);
      tenancy.places.push_back({slot, is_low ? from_end : tenancy.widths[slot] - from_end - size, items[k]});
      from_end += size;
      if (k + 1 == items.size()) from_end += std::clamp<Bytes>(gap, 0, left_[slot]);
    }
  }
}

bool StackRoom::fits(const Tenancy& tenancy, const Tenancy::Hole& hole, std::span<const ItemId> tight) {
  if (hole.slot < 0 || tight.empty()) return true;
  ++num_nodes_;
  fit_.begin();
  Offset low = 0;
  auto place = tenancy.places.begin();
  for (SlotId slot = 0; slot < std::ssize(tenancy.widths); ++slot) {
    const bool is_there = hole.slot == slot;
    const Offset base = is_there && hole.is_low ? low + hole.bytes : low;
    for (; place != tenancy.places.end() && place->slot == slot; ++place) {
      const Item& item = part_.items[place->item];
      fit_.add_cell(base + place->at, base + place->at + item.size, item.first, item.last);
    }
    const Offset high = low + tenancy.widths[slot] + (is_there ? hole.bytes : 0);
    fit_.add_hole(low, high);
    low = high + 1;  // a wall
  }
  return fit_.fits(tight);
}

}  // namespace olla
