// The least live memory any order can have around one op, by one minimum cut.
//
// When op v runs, the ops before it form a downset D that holds v's ancestors and neither v nor its descendants, so
// live(v) >= min live(D) + new_bytes(v) + workspace(v). live(D), the bytes written inside D that are outputs or have a user outside
// D, is submodular: the minimum is a cut. Source side = D; an op's predecessors follow it over infinite edges; a tensor's bytes are
// cut where its producer is inside and one of its users outside. Only ops that are neither ancestors nor descendants enter the
// network.
#pragma once

#include <random>

#include "olla/base/control.hpp"
#include "olla/graph/schedule.hpp"
#include "olla/order/flow.hpp"

namespace olla {

enum class TieBreak : std::uint8_t { kPrefix, kLargest, kRandom };  // which of several minimum cuts is returned

struct CutQuery {
  OpId op = kNoOp;
  Step lo = 0, hi = 0;                              // D holds order[0, lo) and nothing of order[hi, end); lo <= step of op < hi
  std::span<const OpId> inside = {}, outside = {};  // ops D must and must not hold, whatever the order does with them
  Bytes enough = kMaxBytes;                         // stop once the value is known to pass this
  TieBreak tie = TieBreak::kPrefix;
};

struct Cut {
  Bytes value = 0;           // live(D) + new_bytes + workspace: a lower bound on what op needs; exact if `exact`
  bool exact = false;        // the flow is maximum: neither `enough` nor the time limit ended it
  std::vector<OpId> inside;  // if exact: the ops of order[lo, hi) that belong to D, in their present order
};

class CutSolver {
 public:
  // graph and control must outlive the solver.
  CutSolver(const Graph& graph, Control& control, std::uint64_t seed)
      : graph_(graph),
        control_(control),
        random_(seed),
        side_(graph.num_ops()),
        node_(graph.num_ops()),
        counted_(graph.num_tensors(), 0),
        in_network_(graph.num_tensors(), 0) {}

  // schedule must be valid for the graph. O(window) plus one maximum flow over the free ops.
  Cut solve(const Schedule& schedule, const CutQuery& query);

  // Precedences between op v and others that every order with at most `limit` bytes at v obeys, beyond those of the graph: those
  // that one path of the residual network proves. Empty as well if v alone needs more than limit, or time is up.
  std::vector<Edge> implied(const Schedule& schedule, OpId v, Bytes limit);

  std::int64_t num_cuts() const { return num_cuts_; }

 private:
  enum Side : std::uint8_t { kFree, kInside, kOutside };
  Side side(OpId v) const;
  void mark(OpId from, Side to);
  Bytes live_inside();
  Bytes build_network();
  bool add_tensor(TensorId t, FlowNetwork::Node producer);
  std::vector<OpId> read_cut();

  const Graph& graph_;
  Control& control_;
  std::mt19937_64 random_;
  FlowNetwork network_;
  std::int64_t num_cuts_ = 0;

  // State of the query at hand.
  const Schedule* schedule_ = nullptr;
  CutQuery query_;
  std::vector<Side> side_;                          // of ops inside the window
  std::vector<OpId> free_;                          // neither ancestor nor descendant
  std::vector<FlowNetwork::Node> node_;             // of free ops
  std::vector<std::int64_t> counted_, in_network_;  // the number of the last cut that has seen tensor t
  std::vector<OpId> queue_;
  std::vector<FlowNetwork::Node> readers_;
  std::vector<std::uint8_t> reaches_sink_, chosen_;
};

}  // namespace olla
