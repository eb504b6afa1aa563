// Exact search: does a part fit a capacity? Depth first over partial packings, complete, so that it can prove that none fits.
#pragma once

#include <functional>
#include <random>

#include "olla/layout/exact/frontier.hpp"

namespace olla {

enum class Fit { kFits, kNever, kUnknown };  // kUnknown: the nodes were used up, or the search was stopped

struct ExactBudget {
  std::int64_t max_nodes;
  std::function<bool()> stop;  // asked every kNodesPerQuestion nodes
};

// Branches on an item at its release (see Open): it is placed there, or postponed: no packing has it there and it rests on an
// item still to be placed. That is complete for any item below which no overlapping item fits any more (postponement as in
// SetTimes, Godard, Laborie, Nuijten 2005), so the search takes the item where fewest can come next: bottlenecks first, not the
// lowest offset first. Failed states are remembered by the open items and their bases, which alone determine the packings that
// complete them.
class ExactSearch {
 public:
  static constexpr int kNodesPerQuestion = 1000;

  // Fixed items of the part must not overlap.
  ExactSearch(const Part& part, const ExactRules& rules, std::uint64_t seed);

  // Restarts with other ties and other ways to branch until the budget ends. Failures are remembered from call to call while the
  // capacity falls. O(items^2) memory.
  Fit decide(Bytes capacity, const ExactBudget& budget);

  const std::vector<Offset>& offsets() const { return offsets_; }  // of item i, after kFits
  std::int64_t num_nodes() const { return num_nodes_; }            // items placed, in all

 private:
  enum class Branching { kTightest, kConflicts, kLowest };
  struct Frame {
    Group group;
    std::int32_t parent;        // -1 for the first
    std::int32_t num_children;  // frames above this one that are still to be solved
    std::int32_t placed;        // position of the item placed for them
  };

  Fit run(std::int64_t max_nodes, const std::function<bool()>& stop);
  bool descend();
  bool retreat();
  bool expand(std::int32_t x);
  bool postpone(const Group& group, std::int32_t x);
  void blame();
  std::int32_t choose(const Group& group);
  std::int32_t lowest(const Group& group) const;
  std::int32_t tightest(const Group& group);
  Section tightest_section(const Group& group);
  void perturb(int round);
  bool failed_before(const StateHash& hash) const;
  void remember(const StateHash& hash);
  void grow_table(std::int64_t max_nodes);

  const Part& part_;
  const ExactRules rules_;
  Frontier frontier_;
  std::mt19937_64 random_;
  std::vector<Offset> offsets_;
  Level capacity_ = 0;
  Bytes unit_ = 1;
  std::int64_t num_nodes_ = 0;
  int round_ = 0;  // of restarts
  double run_nodes_ = 0;
  Branching branching_ = Branching::kTightest;
  std::vector<std::int32_t> rank_;  // of an item: the least goes first among equals
  std::vector<double> conflicts_;   // of a section: bounds that failed there
  std::vector<Frame> frames_;
  std::vector<Group> rest_;
  std::vector<StateHash> table_;  // failed states; the later of two that share a slot stays
  // Scratch, of a section: work released at or after, where it ends, the earliest start, how many can be the first.
  std::vector<Level> work_, end_, first_start_;
  std::vector<std::int32_t> num_first_;
};

}  // namespace olla
