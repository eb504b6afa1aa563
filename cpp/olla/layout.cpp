#include "olla/layout.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "olla/error.hpp"
#include "olla/packing.hpp"
#include "olla/skyline.hpp"

namespace olla {
namespace {

constexpr double kGraceSeconds = 5;    // for the first pass: what it leaves is stacked, far from well
constexpr int kRoundsPerEpisode = 30;  // of the squeaky wheel, without a better packing
constexpr int kNumLooks = 16;

// log key = size * log(size) + width * log(sections) + crowd * log(greatest load over the lifetime); the greatest key goes first.
struct Weights {
  double size, width, crowd;
};
constexpr Weights kArea{1, 1, 0}, kSize{1, 0, 0}, kWidth{0, 1, 0}, kPeakFirst{0, 1, 8};
constexpr std::array<Weights, 6> kSkylineKeys{kArea, kWidth, {1, 2, 0}, {2, 1, 0}, kSize, kPeakFirst};

class Random {
 public:
  explicit Random(std::uint64_t seed) : bits_(seed) {}
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }  // in [0, 1); the same on every machine

 private:
  std::mt19937_64 bits_;
};

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
        enough_(std::max({watch.height, watch.bound, part.load, watch.capacity})),
        max_placements_(max_placements),
        watch_(watch),
        random_(options.seed),
        skyline_(part) {}

  Packing run() {
    Bytes sum = 0;
    for (const Item& item : part_.items) sum += item.size;
    if (!skyline_.place(sorted(keys(kArea)), {}, [&] { return watch_.stop_first_pass(sum); }, best_)) skyline_.stack_rest(best_);
    if (best_.height > enough_ && options_.use_enumeration && part_.num_items() <= kMaxEnumerated) {
      best_ = enumerate(part_, enough_);
      proved_ = true;
    }
    if (!proved_ && !done()) try_ideas();
    return std::move(best_);
  }

  bool proved() const { return proved_; }  // best is optimal, or enough
  std::int64_t num_placed() const { return num_placed_; }

 private:
  void try_ideas() {
    for (const Weights& weights : std::span(kSkylineKeys).subspan(1)) {
      if (done()) return;
      Packing packing;
      if (skyline_.place(sorted(keys(weights)), {}, stopped(), packing)) keep(std::move(packing));
    }
    if (options_.use_squeaky_wheel) improve();
  }

  bool done() { return best_.height <= enough_ || watch_.stop(best_.height); }
  std::function<bool()> stopped() {
    return [this] { return watch_.stop(best_.height); };
  }
  void keep(Packing packing) {
    if (packing.height < best_.height) best_ = std::move(packing);
  }

  std::vector<double> keys(const Weights& weights) const {
    std::vector<double> result;
    result.reserve(part_.items.size());
    for (const Item& item : part_.items) {
      result.push_back(weights.size * std::log(static_cast<double>(item.size)) + weights.width * std::log(item.last - item.first));
    }
    if (weights.crowd > 0) {
      const SectionReach load(part_.section_load);
      for (ItemId i = 0; i < part_.num_items(); ++i) {
        const Item& item = part_.items[i];
        result[i] += weights.crowd * std::log(static_cast<double>(load.highest(item.first, item.last).first));
      }
    }
    return result;
  }

  static std::vector<ItemId> sorted(const std::vector<double>& keys) {
    std::vector<ItemId> order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](ItemId i, ItemId j) { return keys[i] != keys[j] ? keys[i] > keys[j] : i < j; });
    return order;
  }

  // Squeaky wheel (Joslin, Clements 1999). A pass gives up at a section certain to end above the target; the items alive there that
  // are still to be placed came too late, and their keys rise. Episodes begin at other keys and take other strides. The target is
  // the height that is enough, and in every other episode one that lies between it and the best height.
  void improve() {
    double ambition = 0.5;
    for (std::size_t episode = 0; !spent(); ++episode) {
      const double stride = 0.05 * std::exp(random_.uniform() * std::log(100.0));
      std::vector<double> key = keys(episode < kSkylineKeys.size() ? kSkylineKeys[episode] : random_weights());
      const double share = episode % 2 == 0 ? 1 : ambition;
      bool improved = false;
      for (int round = 0; round < kRoundsPerEpisode && !spent(); ++round) {
        const auto lower = static_cast<Bytes>(share * static_cast<double>(best_.height - enough_));
        const SkylineRules rules{best_.height - std::max(Bytes{1}, lower), options_.use_foresight ? kNumLooks : 0};
        Packing packing;
        num_placed_ += part_.num_items();
        if (skyline_.place(sorted(key), rules, stopped(), packing)) {
          keep(std::move(packing));
          improved = true;
          round = 0;
        } else {
          raise_keys(packing, stride, key);
        }
      }
      if (share < 1 && !improved) ambition /= 2;
    }
  }

  bool spent() { return done() || num_placed_ >= max_placements_; }

  void raise_keys(const Packing& packing, double stride, std::vector<double>& key) {
    const Section culprit = skyline_.culprit();
    for (ItemId i = 0; i < part_.num_items(); ++i) {
      const Item& item = part_.items[i];
      const bool late = packing.offsets[i] == kUnplaced && item.first <= culprit && culprit < item.last;
      if (late) key[i] += stride * random_.uniform();
    }
  }

  Weights random_weights() {
    const double size = 2 * random_.uniform(), width = 2 * random_.uniform();
    return {size, width, std::max(0.0, 16 * random_.uniform() - 8)};
  }

  const Part& part_;
  const LayoutOptions& options_;
  const Bytes enough_;  // no use in a lower height: the load, the capacity, or the height of another part
  const std::int64_t max_placements_;
  std::int64_t num_placed_ = 0;
  bool proved_ = false;
  const Watch watch_;
  Random random_;
  Skyline skyline_;
  Packing best_;
};

// Divides all sizes by what they have in common, so that buffers twice as large get the same layout, twice as high.
Bytes divide_out(std::vector<Bytes>& sizes) {
  Bytes unit = 0;
  for (const Bytes size : sizes) unit = std::gcd(unit, size);
  if (unit == 0) return 1;
  for (Bytes& size : sizes) size /= unit;
  return unit;
}

}  // namespace

LayoutResult layout(std::span<const Buffer> buffers, const LayoutOptions& options, Control& control) {
  if (options.capacity < 0) {
    throw PlanError("capacity is " + std::to_string(options.capacity) + " bytes, expected 0 or more", "capacity", {});
  }
  std::vector<Bytes> sizes = rounded_sizes(buffers, options.alignment);
  const Bytes unit = divide_out(sizes), capacity = options.capacity / unit;
  std::vector<Part> parts = reduce(buffers, sizes);
  std::ranges::stable_sort(parts, std::ranges::greater(), &Part::load);

  LayoutResult result;
  result.offsets.assign(buffers.size(), 0);
  Bytes height = 0, bound = parts.empty() ? 0 : parts.front().load;
  result.load = unit * bound;
  double items_left = 0, placements_left = static_cast<double>(options.max_placements);
  for (const Part& part : parts) items_left += part.num_items();
  for (const Part& part : parts) {
    // Effort and time go to the parts by their number of items; what one leaves over goes to those after it.
    const double share = part.num_items() / items_left;
    const double until = control.seconds() + share * control.seconds_left();
    items_left -= part.num_items();
    PartSearch search(part, options, static_cast<std::int64_t>(share * placements_left), {control, unit, height, bound, capacity, until});
    const Packing packing = search.run();
    placements_left -= static_cast<double>(search.num_placed());
    for (ItemId i = 0; i < part.num_items(); ++i) result.offsets[part.buffers[i]] = unit * packing.offsets[i];
    if (search.proved() && packing.height > std::max(height, bound)) bound = packing.height;
    height = std::max(height, packing.height);
  }
  result.height = unit * height;
  result.bound = unit * bound;
  if (height == bound) result.status = Status::kOptimal;
  return result;
}

}  // namespace olla
