// Ejection: an item that ends above a target goes where it displaces least, what it displaces goes next, and so on until all have a
// place below the target. Source: ejection pools for vehicle routing (Nagata, Braysy 2009), here for packings.
#pragma once

#include <functional>
#include <random>

#include "olla/layout/problem/alive.hpp"

namespace olla {

class Ejection {
 public:
  Ejection(const Part& part, std::uint64_t seed);

  // Lowers the packing until its height is at most enough, or the work is done, or stop says so, asked now and then with the
  // present height. One unit of work for every item looked at. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_work, const std::function<bool(Bytes)>& stop, Packing& best);

 private:
  struct Step {  // as the offset of a place rises, from here on an item is in the way, or no longer is
    Offset at;
    double area;
    bool is_in_way, is_fixed;
  };
  struct Cost {
    int num_items = 0, num_fixed = 0;  // in the way
    double area = 0;                   // of those that can go, as often as they were placed

    void add(const Step& step);
    std::pair<int, double> key() const { return {num_fixed, num_items == 0 ? 0 : std::max(area, 1.0)}; }
  };

  void aim(const Packing& best, Bytes enough);
  bool reach(std::int64_t end, const std::function<bool()>& stop);
  ItemId take();
  bool put(ItemId item);
  Offset cheapest(ItemId item, Cost& least);
  Step step(ItemId item, Offset at, bool is_in_way) const;
  void sort_steps();
  void eject(ItemId item);

  const Part& part_;
  const AliveIndex alive_;
  std::mt19937_64 random_;
  std::int64_t num_work_ = 0;
  double ambition_;              // share of what there is to gain, of the next target
  std::vector<double> area_;     // of an item
  std::vector<double> times_;    // it was placed on the way to the target, and one
  std::vector<Offset> offsets_;  // kUnplaced while in the pool
  std::vector<ItemId> pool_;
  double pool_area_ = 0, least_area_ = 0;
  int patience_ = 0;  // items still to be placed without a smaller pool before the target is given up
  Bytes target_ = 0;
  std::vector<ItemId> near_;  // scratch: placed items alive with the one that goes in, and what follows
  std::vector<Step> steps_, sorted_;
  std::vector<std::int32_t> bucket_;
};

}  // namespace olla
