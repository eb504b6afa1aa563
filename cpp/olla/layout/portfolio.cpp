#include "olla/layout/portfolio.hpp"

#include <array>
#include <atomic>
#include <thread>

#include "olla/layout/greedy/best_fit.hpp"
#include "olla/layout/greedy/by_birth.hpp"

namespace olla {
namespace {

constexpr std::array<Section, 3> kShortSections{2, 8, 32};  // an item alive in no more is short-lived
constexpr ItemId kMaxExactItems = 600;  // the exact search of a whole part takes memory by the square of its items
constexpr ItemId kMinNeighbourhood = 100, kMaxNeighbourhood = 200'000, kMaxOrdered = 200'000;
constexpr std::array<KeyWeights, 3> kOrderKeys{KeyWeights{1, 0, 0}, KeyWeights{2, 1, 0}, KeyWeights{0, 1, 0}};
constexpr ItemId kMinFolded = 1000, kMinRepeating = 100;
constexpr ItemId kMaxBirthsFirst = 150'000;
constexpr ItemId kMaxWhole = 20'000;  // of a part that repeats itself, to be searched as a whole as well
constexpr int kCutsPerTurn = 4, kFrontCuts = 6, kTurnsPerCut = 3;
// Of a turn: placements of the wheel, and what takes about as long.
constexpr std::int64_t kPlacements = 50'000, kLookedAtPerPlacement = 100, kNodesPerTurn = 10'000, kRingNodes = 40'000,
                       kTieNodes = 10'000, kBeamNodes = 20'000, kBeamNodesPerItem = 40, kBeamNodesPerNode = 10,
                       kTrailNodes = 4'000'000, kTrailNodesPerNode = 20;
constexpr std::size_t kMaxBeams = 4;

}  // namespace

Portfolio::Portfolio(const Part& part, const LayoutOptions& options)
    : part_(part),
      options_(options),
      is_free_(part.fixed.empty()),
      is_small_(is_free_ && options.use_exact && part.num_items() <= kMaxExactItems),
      bound_(part.bound),
      skyline_(part),
      wheel_(part, skyline_, options.seed),
      ladder_(part, {options.seed, options.num_threads, options.capacity > 0}) {}

void Portfolio::begin(const std::function<bool()>& stop) {
  if (skyline_.place(by_key(part_, item_keys(part_, kArea)), {}, stop, best_)) return;
  skyline_.stack_rest(best_);
  if (!is_free_) return;
  Packing by_birth{fit_by_birth(part_, 0)};  // as fast as a stack
  by_birth.height = height_of(part_, by_birth.offsets);
  keep(std::move(by_birth));
}

bool Portfolio::done(Bytes enough, const Stop& stop) const {
  return best_.height <= std::max(enough, bound_) || stop(best_.height);
}

void Portfolio::keep(Packing packing) {
  if (packing.height < best_.height) best_ = std::move(packing);
}

bool Portfolio::improve(Bytes enough, Effort& effort, const Stop& stop) {
  if (best_.height <= std::max(enough, bound_)) return false;
  if (num_turns_++ > 0) {
    const Effort before = effort;
    take_turns(enough, effort, stop);
    const bool has_worked = effort.placements < before.placements || effort.nodes < before.nodes || fold_;
    return has_worked && bound_ < best_.height && bound_ <= enough && effort.placements > 0 && effort.nodes > 0;
  }
  if (options_.use_enumeration && is_free_ && part_.num_items() <= kMaxEnumerated) {
    best_ = enumerate(part_, enough);
    if (best_.height > enough) bound_ = best_.height;
    return false;
  }
  if (is_free_ && part_.num_items() >= kMinRepeating) find_repetition();
  // By birth, like follows like; a ring is faster where there is one and the whole is long.
  const bool births_first = !ring_ || part_.num_items() <= kMaxBirthsFirst, tries_births = options_.use_births && is_free_;
  if (tries_births && births_first) try_births(enough, stop);
  for (int turn = 0; turn < 2 && tie_ && !done(enough, stop); ++turn) turn_tie(enough, effort, stop);
  if (repeats_ && !done(enough, stop)) turn_beam(enough, effort, stop);
  if (fold_ && !done(enough, stop)) fold(enough, effort, stop);
  if (fold_ && rules_height_ >= best_.height) return true;
  if (tries_births && !births_first) try_births(enough, stop);
  if (options_.use_keys) try_keys(enough, stop);
  if (options_.use_orders && is_free_ && !is_small_ && part_.num_items() <= kMaxOrdered) try_orders(enough, stop);
  return true;
}

void Portfolio::find_repetition() {
  floor_ = find_floor(part_);
  if (options_.use_tie) tie_ = Tie::find(part_, floor_, {options_.seed, options_.num_threads, false}, options_.use_peaks);
  repeats_ = Repetition::find(part_);
  if (!repeats_) return;
  if (options_.use_fold && part_.num_items() >= kMinFolded) fold_ = Fold::find(part_, *repeats_);
  if (options_.use_ring && Ring::suits(part_, *repeats_)) ring_.emplace(part_, *repeats_, options_.seed);
}

// A turn of the short part, and what repeats from the best cuts of its packing.
void Portfolio::fold(Bytes enough, Effort& effort, const Stop& stop) {
  if (!folded_) {
    folded_ = std::make_unique<Portfolio>(fold_->short_part(), options_);
    folded_->begin([&] { return stop(best_.height); });
    cuts_ = fold_->cuts();
  }
  const Stop whole = [&](Bytes) { return stop(best_.height); };
  folded_->improve(enough, effort, whole);
  if (rules_height_ == 0) rules_height_ = folded_->best().height;
  for (int tries = 0; tries < kCutsPerTurn && folded_->best().height < best_.height && !done(enough, stop); ++tries) {
    // The front ones are the best, others are tried now and then.
    const auto k = static_cast<std::size_t>(num_cuts_ % 2 == 0 ? num_cuts_ / 2 % kFrontCuts : num_cuts_ * 7919 / 2) % cuts_.size();
    ++num_cuts_;
    repeat(cuts_[k], std::max(enough, folded_->best().height), effort, stop);
  }
}

void Portfolio::repeat(Section cut, Bytes enough, Effort& effort, const Stop& stop) {
  const Packing& packing = folded_->best();
  const Part stretch = fold_->stretch(cut, packing);
  if (stretch.bound >= best_.height) return;
  Portfolio search(stretch, options_);
  const Stop whole = [&](Bytes) { return stop(best_.height); };
  search.begin([&] { return stop(best_.height); });
  for (int turn = 0; turn < kTurnsPerCut && search.improve(enough, effort, whole); ++turn) {
  }
  if (search.best().height < best_.height) keep(fold_->unfold(cut, packing, stretch, search.best()));
}

void Portfolio::try_keys(Bytes enough, const Stop& stop) {
  for (const KeyWeights& weights : std::span(kSkylineKeys).subspan(1)) {
    if (done(enough, stop)) return;
    Packing packing;
    const auto stopped = [&] { return stop(best_.height); };
    if (skyline_.place(by_key(part_, item_keys(part_, weights)), {}, stopped, packing)) keep(std::move(packing));
  }
}

// One item after the other, each into the lowest hole: best where sizes and lifetimes have no structure.
void Portfolio::try_orders(Bytes enough, const Stop& stop) {
  std::vector<Buffer> buffers;
  buffers.reserve(part_.items.size());
  for (const Item& item : part_.items) buffers.push_back({item.first, item.last, item.size});
  for (const KeyWeights& weights : kOrderKeys) {
    if (done(enough, stop)) return;
    Control control("layout", std::numeric_limits<double>::infinity(), [&](const Progress&) { return !stop(best_.height); });
    FitResult fit = fit_in_order(buffers, by_key(part_, item_keys(part_, weights)), Hole::kLowest, 1, control);
    if (!control.cancelled()) keep({std::move(fit.offsets), fit.height});
  }
}

// Long-lived items by birth, and the others around them.
void Portfolio::try_births(Bytes enough, const Stop& stop) {
  for (const Section short_sections : kShortSections) {
    if (done(enough, stop)) return;
    Part part = part_;
    part.fixed = fit_by_birth(part, short_sections);
    Skyline skyline(part);
    Packing packing;
    const auto stopped = [&] { return stop(best_.height); };
    if (skyline.place(by_key(part, item_keys(part, kArea)), {}, stopped, packing)) keep(std::move(packing));
  }
}

// The searches take turns, as no one can tell which suits a part. Around fixed items only the wheel and ejection can build.
void Portfolio::take_turns(Bytes enough, Effort& effort, const Stop& stop) {
  const bool is_decision = is_small_ && options_.capacity > 0;
  if (tie_ && !done(enough, stop)) turn_tie(enough, effort, stop);
  if (ring_ && !done(enough, stop)) turn_ring(enough, effort, stop);
  if (fold_ && !done(enough, stop)) fold(enough, effort, stop);
  if ((ring_ || fold_) && part_.num_items() > kMaxWhole) return;
  if (repeats_ && !done(enough, stop)) turn_beam(enough, effort, stop);
  if (repeats_ && !done(enough, stop)) turn_trails(enough, effort, stop);
  if (options_.use_squeaky_wheel && !is_decision && !done(enough, stop)) turn_wheel(enough, effort, stop);
  if (is_small_ && !done(enough, stop)) climb_down(enough, effort, stop);
  if (is_decision || part_.num_items() < kMinNeighbourhood) return;
  if (options_.use_ejection && !is_small_ && !done(enough, stop)) eject(enough, effort, stop);
  if (options_.use_neighbourhood && part_.num_items() <= kMaxNeighbourhood && !done(enough, stop)) {
    search_near(enough, effort, stop);
  }
}

void Portfolio::turn_wheel(Bytes enough, Effort& effort, const Stop& stop) {
  const Bytes before = best_.height;
  const std::int64_t placed = wheel_.num_placed();
  const auto slice = static_cast<std::int64_t>(wheel_share_.slices * std::max<double>(kPlacements, part_.num_items()));
  wheel_.improve(best_, {enough, placed + std::min(effort.placements, slice), 30, options_.use_foresight}, stop);
  effort.placements -= std::max<std::int64_t>(1, wheel_.num_placed() - placed);
  wheel_share_.learn(best_.height < before);
}

void Portfolio::climb_down(Bytes enough, Effort& effort, const Stop& stop) {
  const std::int64_t nodes = std::min(effort.nodes, kNodesPerTurn);
  ladder_.lower(enough, nodes, stop, best_);
  effort.nodes -= nodes;
  bound_ = std::max(bound_, ladder_.bound());
}

void Portfolio::turn_tie(Bytes enough, Effort& effort, const Stop& stop) {
  const Bytes before = best_.height;
  const auto nodes = std::min(effort.nodes, static_cast<std::int64_t>(tie_share_.slices * kTieNodes));
  tie_->lower(enough, nodes, stop, best_);
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  tie_share_.learn(best_.height < before);
}

// Every thread with a search of its own. This thread alone asks stop.
void Portfolio::side_by_side(std::size_t count, Bytes target, const Stop& stop, const Lower& lower) {
  std::atomic<bool> over = false;
  std::vector<Packing> packings(count, best_);
  const auto work = [&](std::size_t t) {
    const auto ended = [&](Bytes height) {
      if (t == 0 && stop(height)) over = true;
      return over.load(std::memory_order_relaxed);
    };
    lower(t, ended, packings[t]);
    if (packings[t].height <= target) over = true;
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 1; t < count; ++t) threads.emplace_back(work, t);
    work(0);
  }
  for (Packing& packing : packings) keep(std::move(packing));
}

void Portfolio::turn_beam(Bytes enough, Effort& effort, const Stop& stop) {
  if (!options_.use_beam || !Beam::suits(part_)) return;
  for (auto t = beams_.size(); t < std::min<std::size_t>(options_.num_threads, kMaxBeams); ++t) {
    beams_.emplace_back(part_, floor_, options_.seed + t);
  }
  const Bytes before = best_.height, target = std::max(enough, bound_);
  const std::int64_t slice = std::max(kBeamNodes, kBeamNodesPerItem * part_.num_items());
  const auto nodes = std::min(effort.nodes / 4 + 1, static_cast<std::int64_t>(beam_share_.slices * static_cast<double>(slice)));
  side_by_side(beams_.size(), target, stop, [&](std::size_t t, const Stop& ended, Packing& best) {
    beams_[t].lower(target, kBeamNodesPerNode * nodes, ended, best);
  });
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  beam_share_.learn(best_.height < before);
}

// Always as many nodes: what they planned once, they know.
void Portfolio::turn_trails(Bytes enough, Effort& effort, const Stop& stop) {
  if (!options_.use_trails) return;
  if (!trails_) {
    trails_.emplace();
    for (std::size_t t = 0; t < std::min<std::size_t>(options_.num_threads, kMaxBeams); ++t) {
      std::unique_ptr<StackTrail> trail = StackTrail::find(part_, floor_, options_.seed + t);
      if (!trail) break;
      trails_->push_back(std::move(trail));
    }
  }
  if (trails_->empty()) return;
  const Bytes target = std::max(enough, bound_);
  const std::int64_t before = trails_->front()->num_nodes();
  side_by_side(trails_->size(), target, stop,
               [&](std::size_t t, const Stop& ended, Packing& best) { (*trails_)[t]->lower(target, kTrailNodes, ended, best); });
  effort.nodes -= std::max<std::int64_t>(1, (trails_->front()->num_nodes() - before) / kTrailNodesPerNode);
}

void Portfolio::turn_ring(Bytes enough, Effort& effort, const Stop& stop) {
  const Bytes before = best_.height;
  const auto nodes = std::min(effort.nodes, static_cast<std::int64_t>(ring_share_.slices * kRingNodes));
  ring_->lower(enough, nodes, stop, best_);
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  ring_share_.learn(best_.height < before);
}

void Portfolio::eject(Bytes enough, Effort& effort, const Stop& stop) {
  if (!ejection_) ejection_.emplace(part_, options_.seed);
  const Bytes before = best_.height;
  const auto placements = std::min(effort.placements, static_cast<std::int64_t>(ejection_share_.slices * kPlacements));
  ejection_->lower(enough, kLookedAtPerPlacement * placements, stop, best_);
  effort.placements -= std::max<std::int64_t>(1, placements);
  ejection_share_.learn(best_.height < before);
}

void Portfolio::search_near(Bytes enough, Effort& effort, const Stop& stop) {
  if (!neighbourhood_) neighbourhood_.emplace(part_, options_.seed);
  const Bytes before = best_.height;
  const auto nodes = std::min(effort.nodes, static_cast<std::int64_t>(neighbourhood_share_.slices * kNodesPerTurn));
  neighbourhood_->lower(enough, nodes, stop, best_);
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  neighbourhood_share_.learn(best_.height < before);
}

}  // namespace olla
