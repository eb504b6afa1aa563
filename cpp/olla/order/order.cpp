#include "olla/order/order.hpp"

#include <algorithm>

#include "olla/order/branch.hpp"
#include "olla/order/refine.hpp"
#include "olla/order/series_parallel.hpp"

namespace olla {

namespace {

// A brief attempt that suffices for most graphs: one pass and a few bounds. Its result is kept only if proved to be the best.
void look(const Graph& graph, const OrderOptions& options, Control& control, Schedule& best, OrderResult& result) {
  const std::int64_t work = 30 * std::int64_t{graph.num_ops()};
  Control brief("order", control.seconds_left(), nullptr, std::min(work, control.work_left()));
  const std::int64_t before = brief.work_left();
  Refiner refiner(graph, brief, options.seed);
  Schedule candidate = best;
  Bytes bound = result.bound;
  refiner.refine(candidate, bound, TieBreak::kPrefix, 1);
  refiner.raise_bound(candidate, bound, graph.num_ops());
  if (candidate.peak <= bound) {
    best = std::move(candidate);
    result.bound = bound;
  }
  result.num_cuts += refiner.num_cuts();
  control.spend(before - brief.work_left());
}

}  // namespace

OrderResult order(const Graph& graph, std::span<const std::vector<OpId>> starts, const OrderOptions& options, Control& control) {
  if (starts.empty()) throw PlanError("ordering needs at least one order to start from", "order", {});
  std::vector<Schedule> schedules;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    if (!graph.is_order(starts[i])) {
      throw PlanError("start " + std::to_string(i) + " breaks a dependency or is no permutation of the ops", "order",
                      {static_cast<std::int64_t>(i)});
    }
    schedules.emplace_back(graph, starts[i]);
  }
  std::stable_sort(schedules.begin(), schedules.end(), [](const Schedule& a, const Schedule& b) { return a.peak < b.peak; });

  Refiner refiner(graph, control, options.seed);
  Schedule best = schedules.front();
  OrderResult result;
  result.bound = working_set_bound(graph);
  auto open = [&] { return best.peak > result.bound && !control.stop(best.peak, result.bound); };
  const auto improve = [&](Schedule start, TieBreak tie) {
    constexpr int kMaxPasses = 50;
    refiner.refine(start, result.bound, tie, kMaxPasses);
    if (start.peak < best.peak) best = std::move(start);
    if (open()) refiner.raise_bound(best, result.bound, graph.num_ops());
  };
  if (open()) look(graph, options, control, best, result);
  if (open()) {
    constexpr int kMaxCharges = 8;
    SeriesParallelResult found = series_parallel_order(graph, best.order, kMaxCharges, control);
    result.bound = std::max(result.bound, found.bound);
    if (!found.order.empty() && found.peak < best.peak) {
      best = Schedule(graph, std::move(found.order));
      schedules.insert(schedules.begin(), best);
    }
  }
  for (std::size_t i = 0; i < schedules.size() && open(); ++i) improve(schedules[i], TieBreak::kPrefix);
  for (int i = 0; i < options.num_restarts && open(); ++i) {
    improve(schedules[i % schedules.size()], i % 2 == 0 ? TieBreak::kRandom : TieBreak::kLargest);
  }
  if (open()) branch_and_bound(graph, options, control, best, result);
  result.num_cuts += refiner.num_cuts();
  result.peak = best.peak;
  result.bound = std::min(result.bound, best.peak);
  result.status = result.bound == result.peak ? Status::kOptimal : Status::kFeasible;
  result.order = std::move(best.order);
  return result;
}

Bytes lower_bound(const Graph& graph, std::vector<OpId> order, std::int64_t max_cuts, Control& control) {
  if (!graph.is_order(order)) throw PlanError("the order breaks a dependency or is no permutation of the ops", "order", {});
  const Schedule schedule(graph, std::move(order));
  Bytes bound = working_set_bound(graph);
  Refiner(graph, control, 0).raise_bound(schedule, bound, max_cuts);
  return bound;
}

}  // namespace olla
