#include "olla/layout.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "olla/error.hpp"
#include "olla/ladder.hpp"
#include "olla/neighbourhood.hpp"
#include "olla/online.hpp"
#include "olla/places.hpp"
#include "olla/squeaky.hpp"

namespace olla {
namespace {

constexpr double kGraceSeconds = 5;                         // for the first pass: what it leaves is stacked, far from well
constexpr std::array<Section, 3> kShortSections{2, 8, 32};  // an item alive in no more is short-lived
constexpr ItemId kMaxExactItems = 600;  // the exact search of a whole part takes memory by the square of its items
constexpr ItemId kMinNeighbourhood = 100, kMaxNeighbourhood = 200'000;
constexpr int kNumTurns = 40;

// When to stop, of one part: best is its height so far.
struct Watch {
  Control& control;
  Bytes unit, height, bound, capacity;  // height and bound of the parts so far
  double until;

  bool over(Bytes best) const { return control.stop(unit * std::max(height, best), unit * bound); }
  bool stop(Bytes best) const { return over(best) || control.seconds() >= until; }
  bool stop_first_pass(Bytes best) const { return over(best) && (control.cancelled() || control.seconds() >= kGraceSeconds); }
};

// Packs one part as low as it can: one greedy pass in any case, then every idea in turn until the height is enough, the effort is
// spent or the watch says so.
class PartSearch {
 public:
  PartSearch(const Part& part, const LayoutOptions& options, std::int64_t max_placements, const Watch& watch)
      : part_(part),
        options_(options),
        enough_(std::max({watch.height, watch.bound, part.bound, watch.capacity})),
        max_placements_(max_placements),
        watch_(watch),
        skyline_(part),
        wheel_(part, skyline_, options.seed),
        ladder_(part, {options.seed, options.num_threads, watch.capacity > 0}) {}

  Packing run() {
    Bytes sum = 0;
    for (const Item& item : part_.items) sum += item.size;
    if (!skyline_.place(by_key(part_, item_keys(part_, kArea)), {}, [&] { return watch_.stop_first_pass(sum); }, best_))
      skyline_.stack_rest(best_);
    if (best_.height > enough_ && options_.use_enumeration && part_.fixed.empty() && part_.num_items() <= kMaxEnumerated) {
      best_ = enumerate(part_, enough_);
      bound_ = best_.height > enough_ ? best_.height : part_.load;
    } else if (!done()) {
      try_ideas();
      bound_ = ladder_.bound();
    }
    return std::move(best_);
  }

  Bytes bound() const { return bound_; }  // proved: no packing is lower
  std::int64_t num_placed() const { return wheel_.num_placed(); }

 private:
  void try_ideas() {
    if (options_.use_births && part_.fixed.empty()) try_births();
    for (const KeyWeights& weights : std::span(kSkylineKeys).subspan(1)) {
      if (done()) return;
      Packing packing;
      if (skyline_.place(by_key(part_, item_keys(part_, weights)), {}, stopped(), packing)) keep(std::move(packing));
    }
    search();
  }

  // The searches take turns, as no one can tell which suits a part; beyond the exact search, the squeaky wheel gains most at first.
  // Around fixed items only the wheel can build.
  void search() {
    const bool is_free = part_.fixed.empty();
    const bool is_small = is_free && options_.use_exact && part_.num_items() <= kMaxExactItems;
    const bool is_decision = is_small && watch_.capacity > 0;
    const bool is_medium = is_free && options_.use_neighbourhood && !is_decision && part_.num_items() >= kMinNeighbourhood &&
                           part_.num_items() <= kMaxNeighbourhood;
    const std::function<bool(Bytes)> stop = [this](Bytes height) { return watch_.stop(height); };
    Neighbourhood neighbourhood(part_, options_.seed);
    const std::int64_t nodes = options_.max_nodes / kNumTurns;
    const std::int64_t head_start = is_small ? 0 : max_placements_ / 2;
    SqueakyOptions wheel{.enough = enough_, .use_foresight = options_.use_foresight};
    for (int turn = 1; turn <= kNumTurns && !done(); ++turn) {
      wheel.max_placements = head_start + turn * ((max_placements_ - head_start) / kNumTurns);
      if (options_.use_squeaky_wheel && !is_decision) wheel_.improve(best_, wheel, stop);
      if (is_small && !done()) ladder_.lower(enough_, nodes, stop, best_);
      if (is_medium && !done()) neighbourhood.lower(enough_, is_small ? nodes / 4 : nodes, stop, best_);
    }
  }

  // Long-lived items by birth, and the others around them.
  void try_births() {
    for (const Section short_sections : kShortSections) {
      if (done()) return;
      Part part = part_;
      part.fixed = fit_by_birth(part, short_sections);
      Skyline skyline(part);
      Packing packing;
      if (skyline.place(by_key(part, item_keys(part, kArea)), {}, stopped(), packing)) keep(std::move(packing));
    }
  }

  bool proved() const { return ladder_.bound() >= (watch_.capacity > 0 ? std::min(best_.height, enough_ + 1) : best_.height); }
  bool done() { return best_.height <= enough_ || proved() || watch_.stop(best_.height); }
  std::function<bool()> stopped() {
    return [this] { return watch_.stop(best_.height); };
  }
  void keep(Packing packing) {
    if (packing.height < best_.height) best_ = std::move(packing);
  }

  const Part& part_;
  const LayoutOptions& options_;
  const Bytes enough_;  // no use in a lower height: the load, the capacity, or the height of another part
  const std::int64_t max_placements_;
  Bytes bound_ = 0;
  const Watch watch_;
  Skyline skyline_;
  SqueakyWheel wheel_;
  Ladder ladder_;
  Packing best_;
};

// Divides all sizes and places by what they have in common, so that buffers twice as large get the same layout, twice as high.
Bytes divide_out(std::vector<Bytes>& sizes, std::vector<Offset>& places) {
  Bytes unit = 0;
  for (const Bytes size : sizes) unit = std::gcd(unit, size);
  for (const Offset place : places) unit = place == kFree ? unit : std::gcd(unit, place);
  if (unit == 0) return 1;
  for (Bytes& size : sizes) size /= unit;
  for (Offset& place : places) place = place == kFree ? kFree : place / unit;
  return unit;
}

// Lays out buffers of rounded sizes; places[i] is where buffer i must lie, or kFree, and there are none where all are free.
LayoutResult place(std::span<const Buffer> buffers, std::vector<Bytes> sizes, std::vector<Offset> places,
                   const LayoutOptions& options, Control& control) {
  LayoutResult result;
  result.offsets = places.empty() ? std::vector<Offset>(buffers.size(), 0) : places;
  std::ranges::replace(result.offsets, kFree, 0);
  const Bytes unit = divide_out(sizes, places), capacity = options.capacity / unit;
  std::vector<Part> parts = reduce(buffers, sizes);
  Bytes height = 0, bound = 0, load = 0;
  double items_left = 0, placements_left = static_cast<double>(options.max_placements);
  for (Part& part : parts) {
    if (!places.empty()) fix_items(places, part);
    bound = std::max(bound, part.bound);
    load = std::max(load, part.load);
    items_left += part.num_items();
  }
  std::ranges::stable_sort(parts, std::ranges::greater(), &Part::bound);
  for (const Part& part : parts) {
    // Effort and time go to the parts by their number of items; what one leaves over goes to those after it.
    const double share = part.num_items() / items_left;
    const double until = control.seconds() + share * control.seconds_left();
    items_left -= part.num_items();
    PartSearch search(part, options, static_cast<std::int64_t>(share * placements_left),
                      {control, unit, height, bound, capacity, until});
    const Packing packing = search.run();
    placements_left -= static_cast<double>(search.num_placed());
    for (ItemId i = 0; i < part.num_items(); ++i) result.offsets[part.buffers[i]] = unit * packing.offsets[i];
    bound = std::max(bound, search.bound());
    height = std::max(height, packing.height);
  }
  result.height = unit * height;
  result.load = unit * load;
  result.bound = unit * bound;
  return result;
}

// Tries to have all preferred offsets that can be had together, and then those that happen to be free.
void prefer(std::span<const Buffer> buffers, const std::vector<Bytes>& sizes, LayoutOptions options, Control& control,
            LayoutResult& result) {
  const auto stop = [&] { return control.stop(result.height, result.bound); };
  options.capacity = result.height;
  LayoutResult wished = place(buffers, sizes, given_places(buffers, sizes, options.alignment, result.height), options, control);
  if (wished.height <= result.height) {
    result.height = wished.height;
    result.offsets = std::move(wished.offsets);
  }
  move_to_preferred(buffers, sizes, result.height, stop, result.offsets);
}

}  // namespace

LayoutResult layout(std::span<const Buffer> buffers, const LayoutOptions& options, Control& control) {
  if (options.capacity < 0) {
    throw PlanError("capacity is " + std::to_string(options.capacity) + " bytes, expected 0 or more", "capacity", {});
  }
  const std::vector<Bytes> sizes = rounded_sizes(buffers, options.alignment);
  LayoutResult result = place(buffers, sizes, given_places(buffers, sizes, options.alignment, -1), options, control);
  const bool any_preferred = std::ranges::any_of(buffers, [](const Buffer& b) { return b.preferred != kFree; });
  if (any_preferred && !control.stop(result.height, result.bound)) prefer(buffers, sizes, options, control, result);
  if (result.height == result.bound) result.status = Status::kOptimal;
  return result;
}

}  // namespace olla
