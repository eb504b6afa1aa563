#include "olla/layout/exact/exact.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

namespace olla {
namespace {

constexpr double kNodesPerRun = 1500, kRunGrowth = 1.08;
constexpr std::size_t kMinTable = 1 << 10, kMaxTable = 1 << 18;

}  // namespace

ExactSearch::ExactSearch(const Part& part, const ExactRules& rules, std::uint64_t seed)
    : part_(part),
      rules_(rules),
      frontier_(part, rules),
      random_(seed),
      offsets_(part.items.size(), kUnplaced),
      rank_(part.items.size()),
      conflicts_(part.section_load.size(), 1),
      work_(part.section_load.size()),
      end_(part.section_load.size()),
      first_start_(part.section_load.size()),
      num_first_(part.section_load.size()) {
  std::ranges::copy(part.fixed, offsets_.begin());
}

Fit ExactSearch::decide(Bytes capacity, const ExactBudget& budget) {
  if (part_.load > capacity) return Fit::kNever;
  const Bytes unit = capacity / kMaxLevel + 1;
  const auto level = static_cast<Level>(capacity / unit);
  if (unit != unit_ || level > capacity_) table_.clear();
  if (level != capacity_) run_nodes_ = kNodesPerRun;
  grow_table(budget.max_nodes);
  unit_ = unit;
  capacity_ = level;
  const std::int64_t end = num_nodes_ + std::min(budget.max_nodes, std::numeric_limits<std::int64_t>::max() - num_nodes_);
  for (; num_nodes_ < end; ++round_, run_nodes_ *= kRunGrowth) {
    perturb(round_);
    const double left = static_cast<double>(end - num_nodes_);
    const Fit fit = run(static_cast<std::int64_t>(std::min(run_nodes_, left)), budget.stop);
    if (fit == Fit::kFits && unit_ > 1) {
      for (const ItemId i : frontier_.free_items()) offsets_[i] *= unit_;
    }
    // With sizes rounded up to a unit, nothing is proved.
    if (fit == Fit::kFits || (fit == Fit::kNever && unit_ == 1)) return fit;
    if (fit == Fit::kNever || budget.stop()) return Fit::kUnknown;
  }
  return Fit::kUnknown;
}

// Grows the table to a slot per node, up to kMaxTable; remembered failures are kept.
void ExactSearch::grow_table(std::int64_t max_nodes) {
  const std::size_t size = std::clamp(std::bit_ceil(static_cast<std::size_t>(max_nodes)), kMinTable, kMaxTable);
  if (size <= table_.size()) return;
  const std::vector<StateHash> old = std::exchange(table_, std::vector<StateHash>(size));
  for (const StateHash& hash : old) {
    if (hash != StateHash()) remember(hash);
  }
}

// Ties go by area, by width or by size, noisily from the second round on.
void ExactSearch::perturb(int round) {
  constexpr Branching kCycle[] = {Branching::kTightest, Branching::kConflicts, Branching::kTightest, Branching::kLowest};
  branching_ = rules_.use_tightest ? kCycle[round % std::ssize(kCycle)] : Branching::kLowest;
  const double size = round % 3 == 1 ? 0 : 1, width = round % 3 == 2 ? 0 : 1, noise = round == 0 ? 0 : 1;
  std::vector<ItemId> order(frontier_.free_items().begin(), frontier_.free_items().end());
  std::vector<double> key(part_.items.size());
  for (const ItemId i : order) {
    const Item& item = part_.items[i];
    key[i] = size * std::log(static_cast<double>(item.size)) + width * std::log(item.last - item.first) +
             noise * static_cast<double>(random_() >> 11) * 0x1p-53;
  }
  std::ranges::stable_sort(order, [&](ItemId i, ItemId j) { return key[i] > key[j]; });
  for (std::size_t r = 0; r < order.size(); ++r) rank_[order[r]] = static_cast<std::int32_t>(r);
}

Fit ExactSearch::run(std::int64_t max_nodes, const std::function<bool()>& stop) {
  const std::int64_t limit = num_nodes_ + max_nodes;
  std::int64_t next_question = num_nodes_ + kNodesPerQuestion;
  if (frontier_.num_free() == 0) return Fit::kFits;
  frames_.assign(1, Frame{{}, -1, 0, -1});
  if (!frontier_.start(capacity_, unit_, frames_[0].group)) return Fit::kNever;
  while (!frames_.empty()) {
    if (num_nodes_ >= limit) return Fit::kUnknown;
    if (num_nodes_ >= next_question) {
      next_question = num_nodes_ + kNodesPerQuestion;
      if (stop()) return Fit::kUnknown;
    }
    if (!descend() && !retreat()) return Fit::kNever;
  }
  return Fit::kFits;
}

// Places an item of the frame on top of the stack. False when the frame fails.
bool ExactSearch::descend() {
  const auto top = static_cast<std::int32_t>(frames_.size()) - 1;
  const std::int32_t x = choose(frames_[top].group);
  if (x < 0) return false;
  if (!expand(x)) return postpone(frames_[top].group, x);
  if (frames_[top].num_children > 0) return true;
  for (std::int32_t solved = top; solved >= 0;) {  // and with it every frame whose last child it was
    const std::int32_t parent = frames_[solved].parent;
    frames_.resize(solved);
    solved = parent >= 0 && --frames_[parent].num_children == 0 ? parent : -1;
  }
  return true;
}

// The frame on top fails, and with it what its parent placed, siblings and all. False when nothing else is left to try.
bool ExactSearch::retreat() {
  while (true) {
    if (rules_.use_table) remember(frames_.back().group.hash);
    const std::int32_t parent = frames_.back().parent;
    if (parent < 0) return false;
    frames_.resize(parent + 1);
    frames_[parent].num_children = 0;
    if (postpone(frames_[parent].group, frames_[parent].placed)) return true;
  }
}

bool ExactSearch::postpone(const Group& group, std::int32_t x) {
  if (frontier_.postpone(group, x)) return true;
  blame();
  return false;
}

bool ExactSearch::expand(std::int32_t x) {
  const auto parent = static_cast<std::int32_t>(frames_.size()) - 1;
  const Open placed = frontier_.open(x);
  ++num_nodes_;
  if (!frontier_.place(frames_[parent].group, x, rest_)) {
    blame();
    return false;
  }
  if (rules_.use_table && std::ranges::any_of(rest_, [&](const Group& g) { return failed_before(g.hash); })) return false;
  offsets_[placed.item] = placed.release;
  frames_[parent].placed = x;
  frames_[parent].num_children = static_cast<std::int32_t>(rest_.size());
  // Small groups fail soonest: the last is solved first.
  std::ranges::stable_sort(rest_, std::ranges::greater(), [](const Group& g) { return g.end - g.begin; });
  for (const Group& group : rest_) frames_.push_back({group, parent, 0, -1});
  return true;
}

void ExactSearch::blame() {
  if (frontier_.culprit() >= 0) ++conflicts_[frontier_.culprit()];
}

bool ExactSearch::failed_before(const StateHash& hash) const { return table_[hash.slot & (table_.size() - 1)] == hash; }
void ExactSearch::remember(const StateHash& hash) { table_[hash.slot & (table_.size() - 1)] = hash; }

// An item that can be branched on: not postponed, and no overlapping item fits below it. -1 when the group fails.
std::int32_t ExactSearch::choose(const Group& group) {
  while (true) {
    std::int32_t x = branching_ == Branching::kLowest ? lowest(group) : tightest(group);
    for (std::int32_t below = x; below >= 0;) {
      x = below;
      below = -1;
      const Open& item = frontier_.open(x);
      Level end = item.release + 1;
      for (std::int32_t k = group.begin; k < group.end; ++k) {
        const Open& other = frontier_.open(k);
        if (other.release + other.size >= end || k == x || !frontier_.meet(item, other)) continue;
        end = other.release + other.size;
        below = k;
      }
    }
    if (!frontier_.open(x).postponed) return x;
    if (frontier_.settle(group)) continue;
    blame();
    return -1;
  }
}

std::int32_t ExactSearch::lowest(const Group& group) const {
  const auto order = frontier_.by_release(group);
  std::int32_t best = order[0];
  for (const std::int32_t k : order) {
    if (frontier_.open(k).release > frontier_.open(best).release) break;
    if (rank_[frontier_.open(k).item] < rank_[frontier_.open(best).item]) best = k;
  }
  return best;
}

// Of the items that can come first in the tightest section, one that can start first.
std::int32_t ExactSearch::tightest(const Group& group) {
  const Section section = tightest_section(group);
  std::int32_t best = -1;
  for (const std::int32_t k : frontier_.by_release(group)) {
    const Open& item = frontier_.open(k);
    if (section < item.first || item.last <= section) continue;
    if (best >= 0 && item.release > frontier_.open(best).release) break;
    if (best < 0 || rank_[item.item] < rank_[frontier_.open(best).item]) best = k;
  }
  return best;
}

// The section where the fewest items can come first without ending above the capacity; low sections and those where bounds
// failed are preferred.
Section ExactSearch::tightest_section(const Group& group) {
  const auto order = frontier_.by_release(group);
  const Section first = group.first, last = group.last;
  Level* const work = work_.data();
  Level* const end = end_.data();
  Level* const start = first_start_.data();
  std::int32_t* const num_first = num_first_.data();
  std::fill(work + first, work + last, 0);
  std::fill(end + first, end + last, 0);
  std::fill(start + first, start + last, -1);
  std::fill(num_first + first, num_first + last, 0);
  std::span<const Frontier::FixedLife> left = frontier_.fixed_lives();
  for (std::size_t k = order.size(); k-- > 0;) {
    const Open item = frontier_.open(order[k]);
    Frontier::add_fixed(left, item.release, first, last, work_);
    for (Section s = item.first; s < item.last; ++s) {
      work[s] += item.size;
      end[s] = std::max(end[s], work[s] + item.release);
      start[s] = item.release;
    }
  }
  for (Section s = first; s < last; ++s) end[s] = start[s] + capacity_ - end[s];  // the latest start of the first
  for (const std::int32_t k : order) {
    const Open item = frontier_.open(k);
    for (Section s = item.first; s < item.last; ++s) num_first[s] += item.release <= end[s];
  }
  double best = std::numeric_limits<double>::max();
  Section where = -1;
  for (Section s = first; s < last; ++s) {
    if (start[s] < 0) continue;
    const double height = static_cast<double>(start[s]) / std::max(capacity_, 1);
    const double score = branching_ == Branching::kConflicts ? num_first[s] / conflicts_[s] : num_first[s] * (0.3 + height);
    if (score < best) best = score, where = s;
  }
  return where;
}

}  // namespace olla
