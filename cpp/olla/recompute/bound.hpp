// Lower bounds of recomputation, whatever the order: on the peak for an added time, and on the added time for a peak.
//
// Consider the first run of op t. Its ancestors have run, its descendants have not. What the descendants will read is in memory
// while t runs, or is made later: by an ancestor, whose recomputation adds its time, or by an unrelated op, at no cost.
// Running an op later needs its inputs in the same way. So for every price of time, in bytes per second, the bytes kept at t plus
// the price of the seconds added are at least a minimum cut; and the peak is at least (cut - price * added) + what t itself
// needs. Cut: value v "needed after t" -> its producer "runs after t", capacity bytes(v); producer -> sink, price * seconds;
// producer -> its inputs, infinite. Where t could overwrite any of several inputs, neither its result nor a lost input counts.
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

  // Bytes: a lower bound, from op t alone, on the peak of every rewriting that adds at most added_seconds. Up to 24 minimum cuts.
  Bytes least_peak(OpId t, double added_seconds, Control& control);
  // Seconds: a lower bound, from op t alone, on what rewritings with at most this peak add; infinity: none has it. As many cuts.
  double least_added_seconds(OpId t, Bytes peak, Control& control);
  // The values that the cheapest continuation after t recomputes, at a price of time in bytes per second. One cut.
  std::vector<ValueId> made_again(OpId t, double price, Control& control);

  // The values dropped at t by the two continuations that bracket the last query, the one with fewer bytes first. Good only as
  // starts of a search: recomputing them may need more memory than there is.
  std::array<std::vector<ValueId>, 2> around() const { return {cheap_, kept_}; }

 private:
  struct Line {  // bytes kept and seconds added by one continuation after t
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
  Csr<OpId> preds_, succs_;  // precedences of first runs that hold in every rewriting
  FlowNetwork network_;

  // Of the op at hand.
  Bytes constant_ = 0;  // resident memory, what t reads, makes and works with
  enum Side : std::uint8_t { kFree, kBefore, kAfter };
  std::vector<std::uint8_t> side_;  // of op v
  std::vector<ValueId> needed_;     // values that ops after t need; first the num_read_ that they read directly
  std::size_t num_read_ = 0;
  std::vector<OpId> makers_;  // ops that may run after t to make them
  std::vector<FlowNetwork::Node> value_node_, op_node_;
  std::vector<Bytes> keep_bytes_;  // of needed_[i], beyond constant_
  std::vector<ValueId> inputs_;
  Marks rerun_reads_;                            // values that recomputing an op reads
  Marks at_hand_, lost_;                         // values that t uses, and that it may overwrite
  std::vector<ValueId> dropped_, cheap_, kept_;  // by the latest cut; by the lines that bracket the query
  std::vector<OpId> queue_;
  std::vector<std::uint8_t> reached_;
};

}  // namespace olla
