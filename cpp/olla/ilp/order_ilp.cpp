#include "olla/ilp/order_ilp.hpp"

#include <algorithm>

#include "olla/graph/profile.hpp"
#include "olla/ilp/order_program.hpp"

namespace olla {
namespace {

std::string message_of(const IlpSearch& search, const OrderIlpResult& result, const OrderIlpOptions& options,
                       const Control& control) {
  if (!search.open()) return "proved: no order has a lower peak";
  if (search.too_large()) {
    return "the ordering program was not built: it needs about " + std::to_string(result.figures.num_nonzeros) + " entries for " +
           std::to_string(result.order.size()) + " ops, the limit is " + std::to_string(options.max_nonzeros) +
           " entries and a gigabyte; order windows of the graph";
  }
  if (search.rounding_bytes() == 0 || control.cancelled()) return result.figures.message;
  return "sizes were rounded for HiGHS: the bound is up to " + std::to_string(search.rounding_bytes()) +
         " bytes below the least peak";
}

}  // namespace

OrderIlpResult order_ilp(const Graph& graph, std::span<const OpId> start, Bytes lower_bound, const Highs& highs,
                         const OrderIlpOptions& options, Control& control) {
  if (!graph.is_order(start)) throw PlanError("the start breaks a dependency or is no permutation of the ops", "order", {});
  OrderIlpResult result;
  result.order.assign(start.begin(), start.end());
  result.peak = profile(graph, start).peak;
  const Bytes proven = std::max(lower_bound, options.reduce ? simple_bound(graph) : graph.resident_bytes());
  IlpSearch search(
      result.peak, proven, peak_grid(graph), highs, options, control, result.figures,
      {"order", "a peak of ", "one of ", "the program has no order with a peak of at most ", ": HiGHS exceeded its tolerances"});
  bool split = false;
  const auto build = [&](Bytes target) {
    OrderProgramOptions of_target{target, search.lower_bound(), options.reduce, Moves::kSafe, split, options.max_nonzeros};
    auto program = std::make_unique<OrderProgram>(graph, of_target, [&] { return search.stop(); });
    result.figures.measure(program->program());
    result.figures.num_nonzeros = program->num_nonzeros();
    Attempt attempt;
    attempt.start = [&, p = program.get()] { return p->encode(result.order); };
    attempt.keep = [&, p = program.get()](std::span<const double> values) {
      std::vector<OpId> order = p->decode(values);
      if (!graph.is_order(order)) throw SolverError("the answer of HiGHS is no order of the ops: its tolerances were exceeded");
      const Bytes peak = profile(graph, order).peak;
      if (peak < result.peak) {
        result.order = std::move(order);
        result.peak = peak;
      }
      return peak;
    };
    attempt.program = std::move(program);
    return attempt;
  };
  // Bounds are tight as a rule, and a low target rules out most of the program: first ask for an order that meets the bound.
  if (search.open() && options.reduce) search.attempt(build, search.lower_bound(), 0.5 * control.seconds_left());
  search.prove(build);
  // Rounded sizes leave a gap of at most the rounding: the same without rounding, for orders that are strictly better.
  split = true;
  while (search.rounding_bytes() > 0 && search.open() && !search.contradicted() && !search.too_large() &&
         search.value() - search.lower_bound() <= search.rounding_bytes() && !search.stop()) {
    const Bytes before = search.value();
    search.attempt(build, before - 1, control.seconds_left());
    if (search.value() == before) break;
  }
  search.finish();
  result.lower_bound = search.lower_bound();
  if (!search.open()) result.status = Status::kOptimal;
  result.figures.message = message_of(search, result, options, control);
  return result;
}

}  // namespace olla
