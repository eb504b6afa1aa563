// Min-cut refinement: rewrites an order around the minimum cut of its peak op, then both sides of that op on their own.
#pragma once

#include "olla/order/cut.hpp"

namespace olla {

// An op that cannot reach the bound inside its window, and the ops whose cuts bound that window, outermost first.
// An op comparable with all of them has its least memory inside the window too (by submodularity, their minimum cuts nest); so if
// the op stands above the bound, it is incomparable with one of them, and the order of these two is what is at stake.
struct Conflict {
  OpId op;
  Bytes value;  // its cut inside the window
  std::vector<OpId> waypoints;
};

class Refiner {
 public:
  // graph and control must outlive the refiner.
  Refiner(const Graph& graph, Control& control, std::uint64_t seed)
      : graph_(graph), control_(control), cuts_(graph, control, seed), known_(graph.num_ops(), 0) {}

  // Lowers the peak of schedule until a pass gains nothing, the bound is met or time is up; never raises it. `bound` is a proven
  // lower bound on the graph's peak and rises as cuts over the whole order are found.
  void refine(Schedule& schedule, Bytes& bound, TieBreak tie, int max_passes);

  // Raises `bound` by the cuts of all ops that stand above it in schedule, highest first; at most max_cuts of them.
  void raise_bound(const Schedule& schedule, Bytes& bound, std::int64_t max_cuts);

  // One rewrite of every window that stands above its target. False if time ended it; the schedule is valid all the same, but its
  // peak may have risen and Schedule::peak is not updated. Conflicts are added to the list, if one is given.
  bool pass(Schedule& schedule, Bytes& bound, TieBreak tie, std::vector<Conflict>* conflicts = nullptr);

  // The value of op v's cut over the whole order, with ops that must run before it or must not; no more exact than `enough`.
  Bytes need(const Schedule& schedule, OpId v, std::span<const OpId> before, std::span<const OpId> after, Bytes enough) {
    return cuts_
        .solve(schedule, {.op = v, .lo = 0, .hi = schedule.num_steps(), .inside = before, .outside = after, .enough = enough})
        .value;
  }
  std::vector<Edge> implied(const Schedule& schedule, OpId v, Bytes limit) { return cuts_.implied(schedule, v, limit); }
  std::int64_t num_cuts() const { return cuts_.num_cuts(); }

 private:
  struct Window {
    Step lo, hi;
    Bytes target;           // memory below this need not fall further
    std::int64_t waypoint;  // the last cut that bounds the window, or -1
  };

  const Graph& graph_;
  Control& control_;
  CutSolver cuts_;
  std::vector<std::uint8_t> known_;  // the cut of op v over the whole order is in the bound already
};

// A bound in bytes without any flow: at op v everything it reads and writes is live, at the end all outputs, and the
// residents always. O(ops + uses).
Bytes working_set_bound(const Graph& graph);

}  // namespace olla
