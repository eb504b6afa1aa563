// Whether short-lived items fit between what lives long.
#pragma once

#include "olla/layout/problem/packing.hpp"

namespace olla {

// Described hole by hole; then the short-lived items are tried one after the other at the ends of what is free throughout their
// lives.
class ShortFit {
 public:
  explicit ShortFit(const Part& part) : part_(part) {}

  void begin();
  // What is free at some time: first the cells that lie there part of the time, then the hole around them.
  void add_cell(Offset first, Offset last, Section birth, Section death) { cells_.push_back({first, last, birth, death}); }
  void add_hole(Offset first, Offset last);

  // False where no way was found with the effort there is.
  bool fits(std::span<const ItemId> items);

 private:
  struct Cell {
    Offset first, last;
    Section birth, death;
  };
  struct Hole {
    Offset first, last;
    std::size_t first_cell, last_cell;
  };

  bool place(std::span<const ItemId> items);
  // Calls try_at for the ends of what is free in a hole all through an item's life, until one call returns true.
  template <class TryAt>
  bool any_end(const Item& item, TryAt&& try_at) const;

  const Part& part_;
  std::vector<Hole> holes_;
  std::vector<Cell> cells_, placed_;
  std::size_t num_steps_ = 0, max_steps_ = 0;
};

}  // namespace olla
