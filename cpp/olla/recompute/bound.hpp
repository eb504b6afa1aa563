// What memory must cost in time, whatever the order: lower bounds on the peak for an added time, on the added time for a peak.
//
// Consider the first run of op t. All ops it depends on have run; none that depends on it has. What those will read is in memory
// while t runs, or is made later: by an op that t depends on, which then runs again and adds its time, or by an op that is neither,
// at no cost. Running an op later needs its inputs in the same way. So for every price of time, in bytes per second, the bytes kept
// at t plus the price of the seconds added are at least a minimum cut; and the peak is at least (cut - price * added) + what t
// itself needs. Cut: value v "needed after t" -> its producer "runs after t", capacity bytes(v); producer -> sink, price * seconds;
// producer -> its inputs, infinite. Where t could overwrite one of several inputs, in some order it does: that is granted.
#pragma once

#include <array>

#include "olla/base/control.hpp"
#include "olla/base/marks.hpp"
#include "olla/graph/values.hpp"
#include "olla/order/flow.hpp"

namespace olla {

class RecomputeBound {
 public:
  // All must outlive it.
  RecomputeBound(const Graph& graph, const Values& values, const Rules& rules);

  // Bytes: no rewriting that adds at most added_seconds has a lower peak, as far as op t tells. Up to 24 minimum cuts.
  Bytes least_peak(OpId t, double added_seconds, Control& control);
  // Seconds: no rewriting with at most this peak adds less, as far as op t tells; infinity where none has that peak. As many cuts.
  double least_added_seconds(OpId t, Bytes peak, Control& control);
  // What the cheapest way to go on after t recomputes rather than keeps, at a price of time in bytes per second. One cut.
  std::vector<ValueId> made_again(OpId t, double price, Control& control);

  // What the ways to go on after t drop there that lie on either side of what was asked last: the cheaper in bytes first. Sound as
  // a start of a search alone: what they make again may need more memory than is there.
  std::array<std::vector<ValueId>, 2> around() const { return {cheap_, kept_}; }

 private:
  struct Line {  // bytes kept and seconds added by one way to go on after t
    double bytes, seconds;
  };
  void select(OpId t);  // finds what is needed after t, and what running t takes
  void mark(OpId t, bool ancestors);
  Line cut(double price, double& value, Control& control);
  void find_inputs(OpId v);
  template <class Objective, class Dear>
  double maximise(Objective objective, Dear dear, Control& control);

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  Csr<OpId> preds_, succs_;  // whose first run comes before whose, in every rewriting
  FlowNetwork network_;

  // Of the op at hand.
  Bytes constant_ = 0;  // resident memory, what t reads, makes and works with
  enum Side : std::uint8_t { kFree, kBefore, kAfter };
  std::vector<std::uint8_t> side_;  // of op v
  std::vector<ValueId> needed_;     // values that a path from the ops after t reaches; first those these read
  std::size_t num_read_ = 0;
  std::vector<OpId> makers_;  // ops that may run after t to make them
  std::vector<FlowNetwork::Node> value_node_, op_node_;
  std::vector<Bytes> keep_bytes_;  // of needed_[i], beyond constant_
  std::vector<ValueId> inputs_;
  Marks rerun_reads_;                            // values that an op reads to run again
  Marks at_hand_, lost_;                         // values that t uses, and that it may overwrite
  std::vector<ValueId> dropped_, cheap_, kept_;  // by the latest cut; by the lines around what was asked
  std::vector<OpId> queue_;
  std::vector<std::uint8_t> reached_;
};

}  // namespace olla
