// Items of one size that follow each other, tied to one place: a part that repeats itself, however often and in whatever order,
// becomes one of few items that live again and again, which the exact search packs.
#pragma once

#include <memory>

#include "olla/layout/exact/ladder.hpp"
#include "olla/layout/pipelines/floor.hpp"
#include "olla/layout/pipelines/peaks.hpp"

namespace olla {

// An item of a long lifetime gets the place of the item of its size that died last. Short-lived ones share a place where they see
// the same places taken around them. What outlives nearly all lies on the floor.
class Tie {
 public:
  // None where too many places are left, or where they need much more at once than the items do.
  static std::unique_ptr<Tie> find(const Part& part, const Floor& floor, const LadderOptions& options, bool use_peaks);

  // Lowers the packing until its height is at most enough, or the nodes are used up, or stop says so, asked with the present
  // height. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best);

 private:
  using Place = std::int32_t;

  Tie(const Part& part, const Floor& floor, const LadderOptions& options, bool use_peaks)
      : part_(part), floor_(floor), options_(options), use_peaks_(use_peaks) {}
  bool tie(Section short_sections);
  Place take_place(std::vector<Place>& alike, const Item& item);
  bool merge();
  void untie(Packing& best) const;

  const Part& part_;
  const Floor floor_;
  const LadderOptions options_;
  const bool use_peaks_;
  std::vector<Place> place_of_;   // of what does not lie there
  std::vector<Bytes> size_;       // of a place
  std::vector<Section> free_at_;  // when the last item there is dead
  Part tied_;                     // its items are the places
  std::vector<Place> places_;     // which
  std::unique_ptr<Ladder> ladder_;
  std::unique_ptr<Peaks> peaks_;
  Packing packing_;  // of the places, above the floor
};

}  // namespace olla
