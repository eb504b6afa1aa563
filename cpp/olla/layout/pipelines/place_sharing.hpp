// Items of one size that follow each other share one place. A part that repeats itself, however often and in whatever order,
// becomes a part of few items with many lifetimes each, which the exact search packs.
#pragma once

#include <memory>

#include "olla/layout/exact/ladder.hpp"
#include "olla/layout/pipelines/long_lived.hpp"

namespace olla {

// An item of a long lifetime gets the place of the item of its size that died last. Short-lived ones share a place where they see
// the same places taken around them. A restriction of the problem: it finds packings, and proves nothing.
class PlaceSharing {
 public:
  // Null where too many places are left, where they need much more at once than the items do, or where items are fixed. The places
  // lie above the base. O(n log n) in the items, where few places share a size.
  static std::unique_ptr<PlaceSharing> find(const Part& part, const LongLivedBase& base, const LadderOptions& options);

  void lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best);

 private:
  using Place = std::int32_t;

  PlaceSharing(const Part& part, const LongLivedBase& base) : part_(part), base_(base) {}
  bool assign(Section short_sections);
  Place take_place(std::vector<Place>& alike, const Item& item);
  bool merge();
  void expand(Packing& best) const;

  const Part& part_;
  const LongLivedBase base_;
  std::vector<Place> place_of_;   // of what does not lie there
  std::vector<Bytes> size_;       // of a place
  std::vector<Section> free_at_;  // when the last item there is dead
  Part shared_;                   // its items are the places
  std::vector<Place> places_;     // which
  std::unique_ptr<Ladder> ladder_;
  Packing packing_;  // of the places, above the base
};

}  // namespace olla
