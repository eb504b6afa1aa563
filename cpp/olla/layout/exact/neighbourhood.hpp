// Large neighbourhood search: frees the items around one that ends too high, and places them anew below a target by the exact
// search, all others being fixed. Source: Shaw 1998, for packings.
#pragma once

#include <functional>
#include <random>

#include "olla/layout/exact/repair.hpp"

namespace olla {

class Neighbourhood {
 public:
  Neighbourhood(const Part& part, std::uint64_t seed) : part_(part), repair_(part), random_(seed) {}

  // Fixed items stay.
  void lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best);

 private:
  enum class Kind { kWhole, kAlive, kLevel };  // nearest items: by whole lifetime, by any part of it, or by offset

  bool reach(Bytes target, std::int64_t end, const std::function<bool()>& stop);
  bool find_late(Bytes target);
  bool is_late(ItemId item, Bytes target) const { return offsets_[item] + part_.items[item].size > target; }
  void free_around(ItemId late);
  double distance(ItemId item, Kind kind, Section centre, Offset level) const;
  std::int64_t num_nodes() const { return num_nodes_ + repair_.num_nodes(); }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

  const Part& part_;
  Repair repair_;
  std::mt19937_64 random_;
  std::int64_t num_nodes_ = 0;   // and what takes as long, but for the repairs'
  double ambition_ = 0.25;       // share of what there is to gain, of the next target
  double num_wanted_ = 30;       // items to free
  std::vector<Offset> offsets_;  // of the present packing, which may be as high as the best, with fewer late items
  std::vector<ItemId> late_;     // items that end above the target
  std::vector<ItemId> free_;
};

}  // namespace olla
