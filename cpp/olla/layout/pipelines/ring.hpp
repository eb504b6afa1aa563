// What repeats, closed to a ring: a packing of one stretch of it that ends as it began, laid end to end, and the begin and the end
// of the part built around that.
#pragma once

#include <functional>
#include <random>

#include "olla/layout/exact/repair.hpp"
#include "olla/layout/pipelines/repetition.hpp"

namespace olla {

// Again and again: a few periods around a cut are packed freely by the exact search. What is alive at the cut, there, is fixed at
// both ends of a stretch, and the exact search packs what lies between. Where that succeeds, copies of the stretch fill all that
// repeats; outwards from there the rest is placed window by window, a window that does not fit reaching back into what lies there.
class Ring {
 public:
  // Whether the part repeats often enough, and has few items in a stretch.
  static bool suits(const Part& part, const Repetition& repeats);

  Ring(const Part& part, const Repetition& repeats, std::uint64_t seed);

  // Lowers the packing until its height is at most enough, or the nodes are used up, or stop says so, asked with the present
  // height. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best);

 private:
  struct Limits {
    Bytes target;
    std::int64_t end;  // of the nodes
    const std::function<bool()>& stop;
  };

  void match_early();
  bool reach(const Limits& limits);
  bool find_state(const Limits& limits);
  bool close(const Limits& limits);
  void lay();
  Fit search(const Part& part, std::span<const Offset> fixed, const Limits& limits, std::vector<Offset>& offsets);
  std::int64_t num_nodes() const { return num_nodes_ + repair_.num_nodes(); }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

  const Part& part_;
  const Repetition& repeats_;
  Repair repair_;
  std::mt19937_64 random_;
  std::vector<ItemId> early_, late_;                    // near the begin, latest death first; near the end, by birth
  std::vector<std::pair<ItemId, ItemId>> early_likes_;  // the second lies where the first can
  std::int64_t num_nodes_ = 0;
  double ambition_ = 1;           // share of what there is to gain, of the next target
  int num_tries_ = 0;             // for the present one, without success
  Section cut_ = 0;               // where the first stretch begins
  std::vector<ItemId> crossing_;  // items alive on both sides of the cut, as they stand in repeats.sorted
  std::vector<Offset> state_;     // of these
  std::vector<Offset> stretch_;   // of the items born in a stretch, as they stand there
  std::vector<Offset> offsets_;   // of all items
};

}  // namespace olla
