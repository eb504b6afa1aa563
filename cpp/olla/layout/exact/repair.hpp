// Places some items of a packing anew, around all the others, by the exact search.
#pragma once

#include "olla/layout/exact/exact.hpp"
#include "olla/layout/problem/alive.hpp"

namespace olla {

class Repair {
 public:
  explicit Repair(const Part& part) : part_(part), alive_(part) {}

  // Gives the free items offsets at which they end at or below the target, or leaves the offsets as they are. Around items that
  // have an offset and are not free; those at kUnplaced are not there.
  Fit place(std::span<const ItemId> free, Bytes target, const ExactBudget& budget, std::uint64_t seed,
            std::vector<Offset>& offsets);

  const AliveIndex& alive() const { return alive_; }
  std::int64_t num_nodes() const { return num_nodes_; }  // in all, and what takes as long

 private:
  Part sub_part(std::span<const ItemId> free, Bytes target, const std::vector<Offset>& offsets) const;

  const Part& part_;
  const AliveIndex alive_;
  std::int64_t num_nodes_ = 0;
};

}  // namespace olla
