// Packs one part: greedy rules, then searches in turns.
#pragma once

#include <optional>

#include "olla/layout/exact/ladder.hpp"
#include "olla/layout/exact/neighbourhood.hpp"
#include "olla/layout/greedy/squeaky_wheel.hpp"
#include "olla/layout/pipelines/beam.hpp"
#include "olla/layout/problem/buffer.hpp"

namespace olla {

// Effort that all parts share: what one leaves over goes to others.
struct Effort {
  std::int64_t placements, nodes;
};

class Portfolio {
 public:
  Portfolio(const Part& part, const LayoutOptions& options);

  // One greedy pass. If it is stopped, the remaining items are stacked, or all are placed by birth: there is always a packing.
  void begin(const std::function<bool()>& stop);

  // One turn of lowering the height towards enough. False when there is nothing left to try, or no effort.
  bool improve(Bytes enough, Effort& effort, const StopAt& stop);

  const Packing& best() const { return best_; }
  Bytes bound() const { return bound_; }  // proved: no packing is lower

 private:
  // A search that lowers the height gets more of the next turn, one that does not gets less.
  struct Share {
    double slices = 1;
    void learn(bool has_gained) { slices = has_gained ? std::min(16.0, 2 * slices) : std::max(0.25, slices / 2); }
  };

  void try_keys(Bytes enough, const StopAt& stop);
  void fill(Skyline& skyline, const Part& part, const KeyWeights& weights, const StopAt& stop);
  void try_births(Bytes enough, const StopAt& stop);
  void take_turns(Bytes enough, Effort& effort, const StopAt& stop);
  void turn_wheel(Bytes enough, Effort& effort, const StopAt& stop);
  void climb_down(Bytes enough, Effort& effort, const StopAt& stop);
  template <class Search>
  void lower_by(Search& search, Share& share, Bytes enough, Effort& effort, const StopAt& stop);
  void turn_beam(Bytes enough, Effort& effort, const StopAt& stop);
  void lower_by_beams(Bytes target, std::int64_t nodes, const StopAt& stop);
  bool done(Bytes enough, const StopAt& stop) const;
  void keep(Packing packing);

  const Part& part_;
  const LayoutOptions& options_;
  const bool is_free_, is_small_;
  Packing best_;
  Bytes bound_ = 0;
  int num_turns_ = 0;
  Skyline skyline_;
  SqueakyWheel wheel_;
  Ladder ladder_;
  std::optional<Neighbourhood> neighbourhood_;
  bool repeats_ = false;
  std::vector<Beam> beams_;  // of a thread
  Share beam_share_, wheel_share_, neighbourhood_share_;
};

}  // namespace olla
