// Squeaky wheel (Joslin, Clements 1999): repeated passes of the skyline; items that came too late in one move forward in the
// next.
#pragma once

#include <array>
#include <random>

#include "olla/layout/greedy/skyline.hpp"

namespace olla {

// log key = size * log(size) + width * log(sections) + crowd * log(greatest load over the lifetime); the greatest key goes first.
struct KeyWeights {
  double size, width, crowd;
};
inline constexpr KeyWeights kArea{1, 1, 0};
inline constexpr std::array<KeyWeights, 6> kSkylineKeys{kArea, {0, 1, 0}, {1, 2, 0}, {2, 1, 0}, {1, 0, 0}, {0, 1, 8}};

std::vector<double> item_keys(const Part& part, const KeyWeights& weights);  // of item i
std::vector<ItemId> by_key(const Part& part, std::span<const double> keys);  // the items without a fixed place, greatest key first

struct SqueakyOptions {
  Bytes enough = 0;                 // the height that ends the search
  std::int64_t max_placements = 0;  // passes times items, of all calls
  bool use_foresight = true;
};

class SqueakyWheel {
 public:
  SqueakyWheel(const Part& part, Skyline& skyline, std::uint64_t seed) : part_(part), skyline_(skyline), bits_(seed) {}

  // Lowers best, a packing of the part, until its height is enough, the placements are made or stop(height) says so. A pass gives
  // up at a section certain to end above the target; the items alive there that are still to be placed came too late, and their
  // keys rise; in every other episode also those of all items like them, so that what is learnt at one of many similar times, the
  // microbatches of a pipeline, say, holds for all. Episodes begin at other keys and take other strides. The target is the height
  // that is enough, and in every other episode one that lies between it and the best height. The next call goes on from here.
  void improve(Packing& best, const SqueakyOptions& options, const StopAt& stop);

  std::int64_t num_placed() const { return num_placed_; }

 private:
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }  // in [0, 1); the same on every machine
  void find_kinds();
  KeyWeights random_weights();
  void raise_keys(const Packing& packing, double stride, bool all_alike, std::vector<double>& keys);

  const Part& part_;
  Skyline& skyline_;
  std::mt19937_64 bits_;
  std::vector<std::int32_t> kind_;  // of item i: items of one kind have one size and are alive in equally many sections
  std::vector<double> rise_;        // scratch: of a kind
  std::int64_t num_placed_ = 0;
  std::size_t episode_ = 0;
  double ambition_ = 0.5;
};

}  // namespace olla
