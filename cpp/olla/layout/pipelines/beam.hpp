// Beam search in the order of time: many partial packings side by side, the least fragmented are kept.
#pragma once

#include <functional>
#include <random>

#include "olla/layout/problem/packing.hpp"

namespace olla {

// Long-lived items are packed first, at the bottom: all others then see a lower problem with the same load.
struct LongLivedBase {
  std::vector<Offset> offsets;  // of item i where it lies in the base, else kUnplaced
  Bytes height = 0;             // of the base; all other items lie above
};

// Items alive in more than half of the sections that could be alive in all of them without a higher load, longest lifetimes first.
// The base is empty where it would take long to find. O(items * sections), at most 10^8 steps.
LongLivedBase find_base(const Part& part);

// Whether births, sizes and lifetimes alike, repeat at least four times over the middle half of the sections, as those of
// microbatches do. O(n).
bool births_repeat(const Part& part);

// Items are placed by birth, each at either end of a hole; of all partial packings that arise, the best `width` go on (Lowerre
// 1976). Their cost estimates how fragmented free space would become if nothing more were born: half the total variation, along
// the addresses, of the square root of the time until death, which is 0 for free space. So items that die together come to lie
// together, next to free space, and one hole moves through memory. Parts whose items come and go in turns, as in pipelines, need
// that: a hole that stays in place serves only its neighbours.
class Beam {
 public:
  // No item is fixed.
  Beam(const Part& part, const LongLivedBase& base, std::uint64_t seed);

  void lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best);

 private:
  struct Cell {
    Offset first, last;
    Section death;
  };
  struct State {
    std::vector<Cell> cells;  // what is alive, by address
    std::uint64_t signature = 0;
  };
  struct Step {
    std::int32_t parent;  // position in the beam before
    Offset offset;
  };
  struct Choice {
    double cost;
    std::int32_t state, cell;  // before which it lies
    Offset offset;
    std::uint64_t signature;
  };

  void begin(Bytes target);
  void next_try(bool has_reached);
  std::size_t max_width() const;  // limited, as every packing keeps its placements
  bool place();
  void remove_ended(Section now, State& state);
  void expand(std::int32_t state, const Item& item);
  void select(const Item& item);
  void take_best(Packing& best) const;
  static std::uint64_t signature(const Cell& cell);

  const Part& part_;
  const LongLivedBase base_;
  std::mt19937_64 random_;
  std::vector<ItemId> order_;  // items outside the base, by birth
  std::vector<double> level_;  // of an item that lives s more sections: sqrt(s)
  std::int64_t num_nodes_ = 0;

  std::size_t width_;
  std::size_t rung_ = 0;  // index of kRungs: the share of the possible gain to try for
  int num_rounds_ = 0;    // of rungs without success

  Bytes target_ = -1;  // of the present try; none where negative
  double noise_ = 0;
  std::size_t next_ = 0;  // to be placed, in the order
  std::vector<State> states_, successors_;
  std::vector<Choice> choices_;
  std::vector<std::vector<Step>> steps_;  // for what is placed
};

}  // namespace olla
