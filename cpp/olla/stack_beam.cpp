#include "olla/stack_beam.hpp"

#include <algorithm>
#include <numeric>

namespace olla {
namespace {

constexpr Section kShortSections = 4;  // an item alive in no more is short-lived
constexpr ItemId kMaxItems = 20'000;
constexpr std::size_t kMinStacks = 8, kMinStackItems = 3, kMaxAlive = 400;
constexpr std::size_t kStarts = 100, kChanges = 500;  // of a start
constexpr std::size_t kWidth = 300, kChildren = 60, kChildrenKept = 2, kMaxFills = 20, kMaxFirst = 3;
constexpr double kStartsAgain = 0.25;  // share of starts that are made of one that went far
constexpr std::size_t kMaxChangesAgain = 5;
// Shares of children: that look where the hole must be; where what is born last lies beside the hole; with a gap in other holes.
constexpr double kToTheHole = 0.95, kLastBesideHole = 0.6, kGaps = 0.2;
constexpr double kFirstAmbition = 0.25, kMinAmbition = 0.06;  // shares of what there is to gain
constexpr int kTriesPerTarget = 6;
constexpr std::int64_t kNodesToComplete = 100'000;
constexpr double kImpossible = -1e9;  // a score

}  // namespace

std::unique_ptr<StackBeam> StackBeam::find(const Part& part, const Floor& floor, std::uint64_t seed) {
  if (!part.fixed.empty() || part.num_items() > kMaxItems) return nullptr;
  std::vector<Stack> stacks = find_stacks(part, floor, kShortSections);
  if (stacks.size() < kMinStacks) return nullptr;
  std::size_t num_items = 0;
  std::vector<std::int64_t> alive(part.section_load.size() + 1, 0), stacks_alive = alive;
  for (const Stack& stack : stacks) {
    num_items += stack.items.size();
    ++stacks_alive[stack.birth];
    --stacks_alive[stack.last_death];
    for (const ItemId i : stack.items) {
      ++alive[part.items[i].first];
      --alive[part.items[i].last];
    }
  }
  if (num_items < kMinStackItems * stacks.size()) return nullptr;
  std::partial_sum(alive.begin(), alive.end(), alive.begin());
  std::partial_sum(stacks_alive.begin(), stacks_alive.end(), stacks_alive.begin());
  if (std::ranges::max(alive) > static_cast<std::int64_t>(kMaxAlive)) return nullptr;
  if (std::ranges::max(stacks_alive) > static_cast<std::int64_t>(StackOutlook::kMaxAlive)) return nullptr;
  return std::unique_ptr<StackBeam>(new StackBeam(part, floor, std::move(stacks), seed));
}

StackBeam::StackBeam(const Part& part, const Floor& floor, std::vector<Stack> stacks, std::uint64_t seed)
    : part_(part),
      floor_(floor),
      outlook_(part, floor, std::move(stacks)),
      stacks_(outlook_.stacks()),
      refit_(part),
      random_{mixed(seed + 1)},
      refit_random_(seed),
      ambition_(kFirstAmbition) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (floor_.offsets[i] == kUnplaced) order_.push_back(i);
  }
}

void StackBeam::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = false;
  const std::function<bool()> asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  while (best.height > enough && num_nodes_ < end && !asked()) {
    if (target_ < 0 || target_ >= best.height) {
      const auto share = static_cast<Bytes>(ambition_ * static_cast<double>(best.height - enough));
      begin(best.height - std::max<Bytes>(1, share));
    }
    bool is_alive = true;
    while (is_alive && next_ < std::ssize(stacks_) && num_nodes_ < end && !asked()) is_alive = advance();
    if (is_alive && next_ < std::ssize(stacks_)) return;
    keep_start();
    if (is_alive && complete(asked, best)) {
      num_tries_ = 0;
    } else if (++num_tries_ % kTriesPerTarget == 0) {
      ambition_ = ambition_ > kMinAmbition ? ambition_ / 2 : 2 * kFirstAmbition;
    }
    target_ = -1;
  }
}

void StackBeam::begin(Bytes target) {
  num_nodes_ += part_.num_items();
  target_ = target;
  capacity_ = target - floor_.height;
  outlook_.begin(capacity_);
  next_ = first_ = outlook_.first_tight();
  num_done_ = 0;
  states_.clear();
  children_.clear();
  seen_.clear();
  steps_.clear();
  outlook_.look_ahead(next_);
}

// One more start, or the children of one more state. False where no packing goes on.
bool StackBeam::advance() {
  ++num_nodes_;
  if (next_ == first_) {
    start();
    return ++num_done_ < kStarts || select();
  }
  expand(static_cast<std::int32_t>(num_done_));
  return ++num_done_ < states_.size() || select();
}

bool StackBeam::select() {
  if (children_.empty()) return false;
  const auto by_score = [](const State& a, const State& b) { return a.score > b.score; };
  if (children_.size() > kWidth) {
    std::nth_element(children_.begin(), children_.begin() + kWidth, children_.end(), by_score);
    children_.resize(kWidth);
  }
  std::vector<Step>& steps = steps_.emplace_back();
  for (const State& child : children_) {
    Step& step = steps.emplace_back(child.parent);
    for (const Cell& cell : child.cells) {
      if (next_ == first_ || outlook_.stack_of(cell.item) == next_) step.placed.push_back(cell);
    }
  }
  std::swap(states_, children_);
  children_.clear();
  seen_.clear();
  num_done_ = 0;
  if (++next_ < std::ssize(stacks_)) outlook_.look_ahead(next_);
  return true;
}

// What is short-lived, and what died before the first stacks were placed, around the stacks of a state.
bool StackBeam::complete(const std::function<bool()>& stop, Packing& best) {
  std::vector<Offset> offsets = floor_.offsets;
  std::int32_t state = 0;
  for (std::size_t k = steps_.size(); k-- > 0;) {
    const Step& step = steps_[k][state];
    for (const Cell& cell : step.placed) offsets[cell.item] = floor_.height + cell.first;
    state = step.parent;
  }
  const std::int64_t before = refit_.num_nodes();
  const bool fits = refit_.extend(order_, target_, {kNodesToComplete, stop}, refit_random_, offsets);
  num_nodes_ += refit_.num_nodes() - before;
  if (!fits) return false;
  best.offsets = std::move(offsets);
  best.height = height_of(part_, best.offsets);
  return true;
}

// The start that led furthest towards the present target, or else to one before.
void StackBeam::keep_start() {
  if (steps_.empty() || (target_ == best_target_ && next_ < best_next_)) return;
  std::int32_t state = 0;
  for (std::size_t k = steps_.size(); --k > 0;) state = steps_[k][state].parent;
  best_start_ = steps_[0][state].placed;
  best_first_ = first_;
  best_next_ = next_;
  best_target_ = target_;
}

// All stacks alive when the first tight ones are, with changes that do not worsen the score.
void StackBeam::start() {
  Arrangement arrangement = best_first_ == first_ && chance(kStartsAgain) ? cut_again() : cut_up();
  if (arrangement.pieces.empty()) return;
  const auto rate = [&](const std::vector<Cell>& cells) { return outlook_.holds(cells) ? outlook_.score(cells) : kImpossible; };
  State state{{}, -1, 0};
  std::vector<Cell> cells;
  stack_up(arrangement, state.cells);
  state.score = rate(state.cells);
  for (std::size_t k = 0; k < kChanges; ++k) {
    Arrangement changed = arrangement;
    change(changed);
    stack_up(changed, cells);
    const double rating = rate(cells);
    ++num_nodes_;
    if (rating < state.score) continue;
    state.score = rating;
    std::swap(state.cells, cells);
    std::swap(arrangement, changed);
  }
  if (state.score > kImpossible) children_.push_back(std::move(state));
}

// One to three pieces of each stack at random; all stacks alike, or each in its own way; what dies first apart from the rest, or
// not. Empty where some die before all are born.
StackBeam::Arrangement StackBeam::cut_up() {
  const bool is_alike = chance(0.5), is_apart = chance(0.5);
  const std::size_t num_apart = 1 + below(kMaxFirst), num_parts = 1 + below(2);
  std::vector<std::size_t> likes;
  Arrangement made;
  for (const StackId s : outlook_.alive()) {
    const std::vector<ItemId>& items = stacks_[s].items;
    while (likes.size() < items.size()) likes.push_back(below(num_parts));
    const std::size_t own_parts = is_alike ? num_parts : 1 + below(2);
    std::vector<Piece> own(own_parts + 1, {s, {}});
    for (std::size_t k = items.size(); k-- > 0;) {  // the first to die first
      if (part_.items[items[k]].last <= stacks_[first_].birth) continue;
      const bool apart = is_apart && items.size() - k <= num_apart;
      own[apart ? own_parts : is_alike ? likes[k] : below(own_parts)].items.push_back(items[k]);
    }
    for (Piece& piece : own) {
      if (piece.items.empty()) continue;
      if (chance(0.5)) std::ranges::reverse(piece.items);
      made.pieces.push_back(std::move(piece));
    }
  }
  std::shuffle(made.pieces.begin(), made.pieces.end(), random_);
  Bytes free = capacity_;
  for (const Piece& piece : made.pieces) {
    for (const ItemId i : piece.items) free -= part_.items[i].size;
  }
  if (free < 0) return {};
  made.gaps.assign(made.pieces.size() + 1, 0);
  for (std::size_t left = 1 + below(3); left > 0; --left) {
    const Bytes gap = left == 1 ? free : std::min(free, gap_like());
    made.gaps[below(made.gaps.size())] += gap;
    free -= gap;
  }
  return made;
}

// The best start, fitted to the capacity, with a few changes. Empty where it does not fit.
StackBeam::Arrangement StackBeam::cut_again() {
  Arrangement made;
  Offset at = 0;
  for (const Cell& cell : best_start_) {
    const StackId stack = outlook_.stack_of(cell.item);
    if (made.pieces.empty() || made.pieces.back().stack != stack || cell.first > at) {
      made.pieces.push_back({stack, {}});
      made.gaps.push_back(cell.first - at);
    }
    made.pieces.back().items.push_back(cell.item);
    at = cell.last;
  }
  made.gaps.push_back(std::max<Bytes>(0, capacity_ - at));
  for (Bytes& gap : made.gaps) {
    const Bytes taken = std::clamp<Bytes>(at - capacity_, 0, gap);
    gap -= taken;
    at -= taken;
  }
  if (at > capacity_) return {};
  for (std::size_t left = below(kMaxChangesAgain + 1); left > 0; --left) change(made);
  return made;
}

void StackBeam::change(Arrangement& arrangement) {
  auto& [pieces, gaps] = arrangement;
  const std::size_t a = below(pieces.size()), b = below(pieces.size());
  switch (below(6)) {
    case 0:
      return std::swap(pieces[a], pieces[b]);
    case 1:
      std::ranges::reverse(pieces[a].items);
      return;
    case 2:
      return std::swap(gaps[below(gaps.size())], gaps[below(gaps.size())]);
    case 3:
      return std::reverse(pieces.begin() + static_cast<std::ptrdiff_t>(std::min(a, b)),
                          pieces.begin() + static_cast<std::ptrdiff_t>(std::max(a, b)) + 1);
    case 4: {
      Piece piece = std::move(pieces[a]);
      pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(a));
      pieces.insert(pieces.begin() + static_cast<std::ptrdiff_t>(b), std::move(piece));
      return;
    }
    default: {  // an item to another piece of its stack
      std::vector<ItemId>&from = pieces[a].items, &to = pieces[b].items;
      if (a == b || pieces[a].stack != pieces[b].stack || from.size() < 2) return;
      const auto item = from.begin() + static_cast<std::ptrdiff_t>(below(from.size()));
      to.push_back(*item);
      from.erase(item);
      std::ranges::sort(to, std::greater<>());  // the first to die first
      if (chance(0.5)) std::ranges::reverse(to);
    }
  }
}

void StackBeam::stack_up(const Arrangement& arrangement, std::vector<Cell>& cells) const {
  const auto& [pieces, gaps] = arrangement;
  cells.clear();
  Offset at = 0;
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    at += gaps[k];
    for (const ItemId i : pieces[k].items) {
      cells.push_back({at, at + part_.items[i].size, i});
      at = cells.back().last;
    }
  }
}

void StackBeam::expand(std::int32_t parent) {
  const StackId stack = next_;
  const Section now = stacks_[stack].birth;
  std::vector<Cell>& cells = states_[parent].cells;
  std::erase_if(cells, [&](const Cell& cell) { return part_.items[cell.item].last <= now; });
  std::vector<Hole> holes;
  Offset low = 0;
  StackId left = -1;
  for (const Cell& cell : cells) {
    const StackId right = outlook_.stack_of(cell.item);
    if (cell.first > low) holes.push_back({low, cell.first, left, right});
    low = cell.last;
    left = right;
  }
  if (capacity_ > low) holes.push_back({low, capacity_, left, -1});
  if (holes.empty()) return;
  const StackId before = stacks_[stack].before < 0 ? -1 : outlook_.room_of(stacks_[stack].before, stack - 1);
  const std::size_t num_before = children_.size();
  std::vector<Cell> child;
  for (std::size_t k = 0; k < kChildren; ++k) {
    ++num_nodes_;
    child = cells;
    if (!sample(holes, before, child)) continue;
    std::ranges::sort(child, {}, &Cell::first);
    if (!seen_.insert(signature(child)).second || !outlook_.holds(child)) continue;
    children_.push_back({child, parent, outlook_.score(child)});
  }
  if (children_.size() <= num_before + kChildrenKept) return;
  const auto own = children_.begin() + static_cast<std::ptrdiff_t>(num_before);
  std::partial_sort(own, own + kChildrenKept, children_.end(), [](const State& a, const State& b) { return a.score > b.score; });
  children_.resize(num_before + kChildrenKept);
}

// Pieces of the present stack in holes. What is not filled goes to the host: beside what dies next, as a rule, and the free space
// to that end of it. What is born last, and so dies first, goes beside the free space, where what is tight before it is there has
// room, or beside the room of those that die before.
bool StackBeam::sample(const std::vector<Hole>& holes, StackId before, std::vector<Cell>& cells) {
  const StackId dying = outlook_.dying();
  const auto beside = [&](StackId stack) {
    std::size_t chosen = holes.size(), count = 0;
    for (std::size_t h = 0; h < holes.size() && stack >= 0; ++h) {
      if ((holes[h].left == stack || holes[h].right == stack) && below(++count) == 0) chosen = h;
    }
    return chosen;
  };
  const auto end_beside = [&](const Hole& hole, StackId stack) {
    if (stack < 0 || (hole.left == stack) == (hole.right == stack)) return End::kAny;
    return hole.left == stack ? End::kLow : End::kHigh;
  };
  std::size_t host = chance(kToTheHole) ? beside(dying) : holes.size();
  if (host == holes.size()) host = below(holes.size());
  const std::size_t anchor = chance(kToTheHole) ? beside(before) : holes.size();
  std::vector<std::size_t> order(holes.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  std::swap(*std::ranges::find(order, host), order.back());
  if (anchor < holes.size() && anchor != host) std::swap(*std::ranges::find(order, anchor), order.front());

  std::vector<ItemId> rest(stacks_[next_].items.rbegin(), stacks_[next_].items.rend());  // the first to die first
  const bool is_beside_free = chance(kLastBesideHole);
  const std::size_t home = is_beside_free ? host : anchor;  // of the first ones
  const std::size_t num_first = home < holes.size() ? std::min(rest.size(), 1 + below(kMaxFirst)) : 0;
  for (const std::size_t h : order) {
    const Hole& hole = holes[h];
    const Bytes room = hole.last - hole.first;
    if (h == host) {
      Bytes bytes = 0;
      for (const ItemId i : rest) bytes += part_.items[i].size;
      if (bytes > room) return false;
      End free_end = end_beside(hole, dying);
      if (free_end == End::kAny && is_beside_free) free_end = chance(0.5) ? End::kLow : End::kHigh;
      lay(std::move(rest), hole, free_end, is_beside_free ? free_end : h == anchor ? end_beside(hole, before) : End::kAny, cells);
      return true;
    }
    if (h != anchor && chance(0.25)) continue;
    const Bytes gap = chance(kGaps) ? gap_like() : 0;
    if (gap >= room) continue;
    const std::size_t num_kept = home == host ? num_first : 0;
    std::vector<ItemId> piece = fill(std::span(rest).subspan(num_kept), h == home ? num_first : 0, room - gap);
    std::erase_if(rest, [&](ItemId i) { return std::ranges::find(piece, i) != piece.end(); });
    lay(std::move(piece), hole, End::kAny, h == anchor ? end_beside(hole, before) : End::kAny, cells);
  }
  return true;
}

// Of a few random choices the one that leaves least room; the first ones are in it where they fit.
std::vector<ItemId> StackBeam::fill(std::span<const ItemId> items, std::size_t num_first, Bytes room) {
  std::vector<ItemId> shuffled(items.begin(), items.end()), chosen, best;
  Bytes least = room;
  for (std::size_t left = 1 + below(kMaxFills); left > 0 && least > 0; --left) {
    for (std::size_t k = shuffled.size(); k > num_first + 1; --k) {
      std::swap(shuffled[k - 1], shuffled[num_first + below(k - num_first)]);
    }
    chosen.clear();
    Bytes unused = room;
    for (const ItemId i : shuffled) {
      if (part_.items[i].size > unused) continue;
      chosen.push_back(i);
      unused -= part_.items[i].size;
    }
    if (unused >= least) continue;
    least = unused;
    std::swap(best, chosen);
  }
  return best;
}

void StackBeam::lay(std::vector<ItemId> items, const Hole& hole, End free_end, End first_dying, std::vector<Cell>& cells) {
  if (items.empty()) return;
  std::ranges::sort(items, {}, [&](ItemId i) { return part_.items[i].last; });
  if (first_dying == End::kHigh || (first_dying == End::kAny && chance(0.5))) std::ranges::reverse(items);
  Bytes free = hole.last - hole.first;
  for (const ItemId i : items) free -= part_.items[i].size;
  Bytes below_them = free_end == End::kLow || (free_end == End::kAny && chance(0.5)) ? free : 0;
  if (chance(1.0 / 3)) {
    const Bytes gap = std::min(free, gap_like());
    below_them = chance(0.5) ? gap : free - gap;
  }
  Offset at = hole.first + below_them;
  for (const ItemId i : items) {
    cells.push_back({at, at + part_.items[i].size, i});
    at = cells.back().last;
  }
}

// The same for a packing and its mirror image.
std::uint64_t StackBeam::signature(const std::vector<Cell>& cells) const {
  std::uint64_t up = 0, down = 0;
  for (const Cell& cell : cells) {
    const std::uint64_t item = mixed(static_cast<std::uint64_t>(cell.item) + 1);
    up += mixed(item + static_cast<std::uint64_t>(cell.first));
    down += mixed(item + static_cast<std::uint64_t>(capacity_ - cell.last));
  }
  return std::min(up, down);
}

}  // namespace olla
