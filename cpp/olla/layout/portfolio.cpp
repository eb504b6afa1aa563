#include "olla/layout/portfolio.hpp"

#include <array>
#include <atomic>
#include <thread>

#include "olla/layout/greedy/by_birth.hpp"

namespace olla {
namespace {

constexpr std::array<Section, 3> kShortSections{2, 8, 32};  // items alive in at most so many are short-lived
constexpr ItemId kMaxExactItems = 600;  // the exact search of a whole part takes memory by the square of its items
constexpr ItemId kMinNeighbourhood = 100, kMaxNeighbourhood = 200'000, kMinRepeating = 100;
// Of a turn: placements of the wheel, and what takes about as long.
constexpr std::int64_t kPlacements = 50'000, kNodesPerTurn = 10'000, kBeamNodes = 20'000, kBeamNodesPerItem = 40,
                       kBeamNodesPerNode = 10;
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
      ladder_(part, options.seed, options.num_threads, options.capacity > 0) {}

void Portfolio::begin(const std::function<bool()>& stop) {
  if (skyline_.place(by_key(part_, item_keys(part_, kArea)), {}, stop, best_)) return;
  skyline_.stack_rest(best_);
  if (!is_free_) return;
  Packing by_birth{fit_by_birth(part_, 0)};  // as fast as a stack
  by_birth.height = height_of(part_, by_birth.offsets);
  keep(std::move(by_birth));
}

bool Portfolio::done(Bytes enough, const StopAt& stop) const {
  return best_.height <= std::max(enough, bound_) || stop(best_.height);
}

void Portfolio::keep(Packing packing) {
  if (packing.height < best_.height) best_ = std::move(packing);
}

bool Portfolio::improve(Bytes enough, Effort& effort, const StopAt& stop) {
  if (best_.height <= std::max(enough, bound_)) return false;
  if (num_turns_++ > 0) {
    const Effort before = effort;
    take_turns(enough, effort, stop);
    const bool has_worked = effort.placements < before.placements || effort.nodes < before.nodes;
    return has_worked && bound_ < best_.height && bound_ <= enough && effort.placements > 0 && effort.nodes > 0;
  }
  if (options_.use_enumeration && is_free_ && part_.num_items() <= kMaxEnumerated) {
    best_ = enumerate(part_, enough);
    if (best_.height > enough) bound_ = best_.height;
    return false;
  }
  repeats_ = options_.use_beam && is_free_ && part_.num_items() >= kMinRepeating && births_repeat(part_);
  if (options_.use_births && is_free_) try_births(enough, stop);
  if (repeats_ && !done(enough, stop)) turn_beam(enough, effort, stop);
  if (options_.use_keys) try_keys(enough, stop);
  return true;
}

void Portfolio::try_keys(Bytes enough, const StopAt& stop) {
  for (const KeyWeights& weights : std::span(kSkylineKeys).subspan(1)) {
    if (done(enough, stop)) return;
    fill(skyline_, part_, weights, stop);
  }
}

void Portfolio::fill(Skyline& skyline, const Part& part, const KeyWeights& weights, const StopAt& stop) {
  Packing packing;
  const auto stopped = [&] { return stop(best_.height); };
  if (skyline.place(by_key(part, item_keys(part, weights)), {}, stopped, packing)) keep(std::move(packing));
}

// Long-lived items by birth, and the others around them.
void Portfolio::try_births(Bytes enough, const StopAt& stop) {
  for (const Section short_sections : kShortSections) {
    if (done(enough, stop)) return;
    Part part = part_;
    part.fixed = fit_by_birth(part, short_sections);
    Skyline skyline(part);
    fill(skyline, part, kArea, stop);
  }
}

// The searches take turns, as it is unknown which suits a part. Only the wheel and the neighbourhoods handle fixed items.
void Portfolio::take_turns(Bytes enough, Effort& effort, const StopAt& stop) {
  if (repeats_ && !done(enough, stop)) turn_beam(enough, effort, stop);
  if (options_.use_squeaky_wheel && !done(enough, stop)) turn_wheel(enough, effort, stop);
  if (is_small_ && !done(enough, stop)) climb_down(enough, effort, stop);
  if (!options_.use_neighbourhood || done(enough, stop)) return;
  if (part_.num_items() < kMinNeighbourhood || part_.num_items() > kMaxNeighbourhood) return;
  if (!neighbourhood_) neighbourhood_.emplace(part_, options_.seed);
  lower_by(*neighbourhood_, neighbourhood_share_, enough, effort, stop);
}

void Portfolio::turn_wheel(Bytes enough, Effort& effort, const StopAt& stop) {
  const Bytes before = best_.height;
  const std::int64_t placed = wheel_.num_placed();
  const auto slice = static_cast<std::int64_t>(wheel_share_.slices * std::max<double>(kPlacements, part_.num_items()));
  wheel_.improve(best_, {enough, placed + std::min(effort.placements, slice), options_.use_foresight}, stop);
  effort.placements -= std::max<std::int64_t>(1, wheel_.num_placed() - placed);
  wheel_share_.learn(best_.height < before);
}

void Portfolio::climb_down(Bytes enough, Effort& effort, const StopAt& stop) {
  const std::int64_t nodes = std::min(effort.nodes, kNodesPerTurn);
  ladder_.lower(enough, nodes, stop, best_);
  effort.nodes -= nodes;
  bound_ = std::max(bound_, ladder_.bound());
}

template <class Search>
void Portfolio::lower_by(Search& search, Share& share, Bytes enough, Effort& effort, const StopAt& stop) {
  const Bytes before = best_.height;
  const auto nodes = std::min(effort.nodes, static_cast<std::int64_t>(share.slices * kNodesPerTurn));
  search.lower(enough, nodes, stop, best_);
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  share.learn(best_.height < before);
}

void Portfolio::turn_beam(Bytes enough, Effort& effort, const StopAt& stop) {
  if (beams_.empty()) {
    const LongLivedBase base = find_base(part_);
    const auto num_beams = std::min<std::size_t>(options_.num_threads, kMaxBeams);
    for (std::size_t t = 0; t < num_beams; ++t) beams_.emplace_back(part_, base, options_.seed + t);
  }
  const Bytes before = best_.height;
  const std::int64_t slice = std::max(kBeamNodes, kBeamNodesPerItem * part_.num_items());
  const auto nodes = std::min(effort.nodes / 4 + 1, static_cast<std::int64_t>(beam_share_.slices * static_cast<double>(slice)));
  lower_by_beams(std::max(enough, bound_), kBeamNodesPerNode * nodes, stop);
  effort.nodes -= std::max<std::int64_t>(1, nodes);
  beam_share_.learn(best_.height < before);
}

// Every thread with a beam of its own. This thread alone asks stop.
void Portfolio::lower_by_beams(Bytes target, std::int64_t nodes, const StopAt& stop) {
  std::atomic<bool> over = false;
  std::vector<Packing> packings(beams_.size(), best_);
  const auto work = [&](std::size_t t) {
    const auto ended = [&](Bytes height) {
      if (t == 0 && stop(height)) over = true;
      return over.load(std::memory_order_relaxed);
    };
    beams_[t].lower(target, nodes, ended, packings[t]);
    if (packings[t].height <= target) over = true;
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 1; t < beams_.size(); ++t) threads.emplace_back(work, t);
    work(0);
  }
  for (Packing& packing : packings) keep(std::move(packing));
}

}  // namespace olla
