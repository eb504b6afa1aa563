#include "olla/order/refine.hpp"

#include <algorithm>
#include <numeric>

namespace olla {

Bytes working_set_bound(const Graph& graph) {
  Bytes bound = graph.resident_bytes();
  for (TensorId t = 0; graph.num_ops() > 0 && t < graph.num_tensors(); ++t)
    bound += graph.planned(t) && graph.output(t) ? graph.bytes(t) : 0;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    Bytes used = graph.resident_bytes() + graph.new_bytes(v) + graph.workspace(v);
    for (const TensorId t : graph.uses(v)) used += graph.planned(t) ? graph.bytes(t) : 0;
    bound = std::max(bound, used);
  }
  return bound;
}

void Refiner::refine(Schedule& schedule, Bytes& bound, TieBreak tie, int max_passes) {
  double excess = schedule.excess(bound);
  for (int i = 0; i < max_passes && schedule.peak > bound && !control_.stop(schedule.peak, bound); ++i) {
    Schedule candidate = schedule;
    const bool complete = pass(candidate, bound, tie);
    candidate.update_peak(graph_);
    const double candidate_excess = candidate.excess(bound);
    const bool better = candidate.peak < schedule.peak || (candidate.peak == schedule.peak && candidate_excess < excess);
    if (better) {
      schedule = std::move(candidate);
      excess = schedule.excess(bound);
    }
    if (!better || !complete) return;
  }
}

bool Refiner::pass(Schedule& schedule, Bytes& bound, TieBreak tie, std::vector<Conflict>* conflicts) {
  std::vector<Window> windows{{0, schedule.num_steps(), bound, -1}};
  std::vector<std::pair<OpId, std::int64_t>> waypoints;  // an op, and the one whose window it stood in
  std::vector<OpId> ops, rest;
  while (!windows.empty()) {
    auto [lo, hi, target, waypoint] = windows.back();
    windows.pop_back();
    if (lo >= hi) continue;
    target = std::max(target, bound);
    const Step peak = schedule.peak_step(lo, hi);
    if (schedule.live[peak] <= target) continue;
    const OpId v = schedule.order[peak];
    Cut cut = cuts_.solve(schedule, {.op = v, .lo = lo, .hi = hi, .tie = tie});
    if (!cut.exact) return false;
    if (lo == 0 && hi == schedule.num_steps()) {
      bound = std::max(bound, cut.value);
      known_[v] = 1;
    }
    if (conflicts != nullptr && cut.value > bound) {
      Conflict conflict{v, cut.value, {}};
      for (auto w = waypoint; w >= 0; w = waypoints[w].second) conflict.waypoints.push_back(waypoints[w].first);
      std::reverse(conflict.waypoints.begin(), conflict.waypoints.end());
      conflicts->push_back(std::move(conflict));
    }
    if (cut.value >= schedule.live[peak]) continue;  // tight: nothing lowers this window's peak

    ops = cut.inside;
    ops.push_back(v);
    const Step middle = lo + static_cast<Step>(ops.size()) - 1;
    std::size_t next = 0;  // of cut.inside, which keeps the present order
    for (Step s = lo; s < hi; ++s) {
      const OpId u = schedule.order[s];
      if (next < cut.inside.size() && cut.inside[next] == u) {
        ++next;
      } else if (u != v) {
        ops.push_back(u);
      }
    }
    schedule.rewrite(graph_, lo, ops);
    const Bytes reached = std::max(target, cut.value);
    waypoints.emplace_back(v, waypoint);
    const auto last = static_cast<std::int64_t>(waypoints.size()) - 1;
    windows.push_back({static_cast<Step>(middle + 1), hi, reached, last});
    windows.push_back({lo, middle, reached, last});
  }
  return true;
}

void Refiner::raise_bound(const Schedule& schedule, Bytes& bound, std::int64_t max_cuts) {
  std::vector<Step> steps;
  for (Step s = 0; s < schedule.num_steps(); ++s) {
    if (schedule.live[s] > bound && known_[schedule.order[s]] == 0) steps.push_back(s);
  }
  std::stable_sort(steps.begin(), steps.end(), [&](Step a, Step b) { return schedule.live[a] > schedule.live[b]; });
  for (const Step s : steps) {
    if (max_cuts-- <= 0 || schedule.live[s] <= bound || control_.stop(schedule.peak, bound)) return;
    const OpId v = schedule.order[s];
    const Cut cut = cuts_.solve(schedule, {.op = v, .lo = 0, .hi = schedule.num_steps()});
    bound = std::max(bound, cut.value);
    known_[v] = cut.exact ? 1 : 0;
  }
}

}  // namespace olla
