// Beam search over stacks of items: where a hole must wander through memory so that each stack finds it when it dies.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <unordered_set>

#include "olla/hash.hpp"
#include "olla/refit.hpp"
#include "olla/stack_outlook.hpp"

namespace olla {

// Where stacks come and go in an order of their own, as the microbatches of interleaved pipelines do, the last scratch buffers of a
// stack fit only beside what dies just then: the hole must lie there at that time, and beside the next stack at the next. A place
// for every size cannot do that. So whole stacks are placed at their birth, in pieces, into the holes there are; what is
// short-lived only has to fit, and is placed in the end, around them. Of many such packings, those go on in which most stacks would
// find the hole beside them if it came from the room of the stack that dies before, and in which most of the rooms that follow each
// other lie side by side. The hole crosses a stack, or goes from one piece of its room to another, where the next stack has its
// pieces laid otherwise than the last one: sums of sizes decide.
class StackBeam {
 public:
  // None where there are few stacks, or too many items alive at once.
  static std::unique_ptr<StackBeam> find(const Part& part, const Floor& floor, std::uint64_t seed);

  // Lowers the packing until its height is at most enough, or the nodes are used up, or stop says so, asked with the present
  // height. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best);

 private:
  using StackId = StackOutlook::StackId;
  using Cell = StackOutlook::Cell;
  struct State {
    std::vector<Cell> cells;  // what is alive of stacks, by address
    std::int32_t parent;      // position in the beam before
    double score;
  };
  struct Piece {
    StackId stack;
    std::vector<ItemId> items;  // by address
  };
  struct Arrangement {
    std::vector<Piece> pieces;  // by address
    std::vector<Bytes> gaps;    // below each, and above the last
  };
  struct Hole {
    Offset first, last;
    StackId left, right;  // beside it; -1: none
  };
  struct Step {
    std::int32_t parent;
    std::vector<Cell> placed;
  };
  enum class End { kAny, kLow, kHigh };

  StackBeam(const Part& part, const Floor& floor, std::vector<Stack> stacks, std::uint64_t seed);
  void begin(Bytes target);
  bool advance();
  bool select();
  bool complete(const std::function<bool()>& stop, Packing& best);

  void start();
  void keep_start();
  Arrangement cut_up();
  Arrangement cut_again();
  void change(Arrangement& arrangement);
  void stack_up(const Arrangement& arrangement, std::vector<Cell>& cells) const;
  void expand(std::int32_t parent);
  bool sample(const std::vector<Hole>& holes, StackId before, std::vector<Cell>& cells);
  std::vector<ItemId> fill(std::span<const ItemId> items, std::size_t num_first, Bytes room);
  void lay(std::vector<ItemId> items, const Hole& hole, End free_end, End first_dying, std::vector<Cell>& cells);

  std::uint64_t signature(const std::vector<Cell>& cells) const;
  Bytes gap_like() { return outlook_.gaps()[below(outlook_.gaps().size())]; }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>((random_() >> 32) * count >> 32); }
  bool chance(double share) { return static_cast<double>(random_() >> 11) < share * 0x1p53; }

  const Part& part_;
  const Floor floor_;
  StackOutlook outlook_;
  const std::vector<Stack>& stacks_;
  std::vector<ItemId> order_;  // what does not lie on the floor, by birth
  Refit refit_;
  FastRandom random_;
  std::mt19937_64 refit_random_;
  std::int64_t num_nodes_ = 0;
  double ambition_;
  int num_tries_ = 0;  // for the present one, without success
  // Of the try that went furthest.
  std::vector<Cell> best_start_;
  StackId best_first_ = -1, best_next_ = 0;
  Bytes best_target_ = -1;

  // Of the present try.
  Bytes target_ = -1;  // none where negative
  Bytes capacity_ = 0;
  StackId first_ = 0, next_ = 0;
  std::size_t num_done_ = 0;  // starts or states
  std::vector<State> states_, children_;
  std::unordered_set<std::uint64_t> seen_;
  std::vector<std::vector<Step>> steps_;
};

}  // namespace olla
