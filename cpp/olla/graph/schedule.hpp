// An order that is being edited, with the memory around every step, and the repair of an invalid order.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

struct Schedule {
  // order must be valid for graph (Graph::is_order).
  Schedule(const Graph& graph, std::vector<OpId> order);

  std::vector<OpId> order;
  std::vector<Step> step;     // of op v
  std::vector<Bytes> before;  // bytes live just before step s: the live memory of the downset order[0, s)
  std::vector<Bytes> live;    // bytes live during step s
  Bytes peak = 0;

  Step num_steps() const { return static_cast<Step>(order.size()); }
  Step peak_step(Step lo, Step hi) const;  // first step at the maximum of live over [lo, hi); lo < hi

  // Replaces order[lo, lo + ops.size()) by ops, a permutation of what stands there. peak is left to update_peak.
  void rewrite(const Graph& graph, Step lo, std::span<const OpId> ops);
  void update_peak(const Graph& graph);

  // Bytes above level, summed over the steps: how far the whole order stands above a target.
  double excess(Bytes level) const;

 private:
  void simulate(const Graph& graph, Step lo, Step hi);
  std::vector<Step> last_;  // step of tensor t's last user (its producer where nobody uses it)
};

// The valid order that stays closest to `wanted`: the ready op that stands first in it runs next. With `backward`, the mirror
// image: the last place goes to the op that stands last among those whose successors are placed. Throws PlanError "order" unless
// `wanted` is a permutation of the ops. O((ops + dependencies) log ops).
std::vector<OpId> nearest_order(const Graph& graph, std::span<const OpId> wanted, bool backward = false);

}  // namespace olla
