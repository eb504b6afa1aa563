#include "olla/ilp/order_ilp.hpp"

#include <algorithm>
#include <cmath>

#include "olla/graph/profile.hpp"
#include "olla/ilp/order_program.hpp"

namespace olla {
namespace {

std::string bytes_text(Bytes bytes) { return std::to_string(bytes) + " bytes"; }

// One run of order_ilp: what is known so far and how to learn more.
class Search {
 public:
  Search(const Graph& graph, const Highs& highs, const OrderIlpOptions& options, Control& control, OrderIlpResult& result)
      : graph_(graph), highs_(highs), options_(options), control_(control), result_(result) {}

  // Builds and solves the program of the orders with peak <= target, and takes over the order and the bound that come out.
  void solve(Bytes target, double time_limit_seconds, bool split = false) {
    const double begin = control_.seconds();
    OrderProgramOptions options;
    options.target = target;
    options.lower_bound = result_.lower_bound;
    options.reduce = options_.reduce;
    options.max_nonzeros = options_.max_nonzeros;
    options.split = split;
    const OrderProgram program(graph_, options, [this] { return control_.stop(result_.peak, result_.lower_bound); });
    result_.figures.num_columns = program.program().num_columns();
    result_.figures.num_rows = program.program().num_rows();
    result_.figures.num_nonzeros = program.num_nonzeros();
    const double built = control_.seconds();
    result_.figures.seconds_build += built - begin;
    too_large_ = program.outcome() == OrderProgram::Outcome::kTooLarge;
    if (program.outcome() == OrderProgram::Outcome::kNoOrder) rule_out(target);
    if (program.outcome() != OrderProgram::Outcome::kBuilt) return;
    run(program, target, time_limit_seconds - (built - begin));
    result_.figures.seconds_solve += control_.seconds() - built;
  }

  bool too_large() const { return too_large_; }
  const std::string& contradiction() const { return contradiction_; }
  Bytes rounding_bytes() const { return rounding_bytes_; }

 private:
  void run(const OrderProgram& program, Bytes target, double time_limit_seconds) {
    // Orders above the target are not in the program: its bound says nothing about them.
    const auto bound_of = [&](double bound) { return std::min(program.bound_bytes(bound), above(target)); };
    MipOptions mip;
    mip.time_limit_seconds = time_limit_seconds;
    mip.seed = options_.seed;
    mip.num_threads = options_.num_threads;
    mip.tolerance = program.tolerance();
    mip.watch = [&](double objective, double bound) {
      const bool known = program.exact() && std::isfinite(objective);
      const Bytes peak = known ? std::min(result_.peak, program.peak_bytes(objective)) : result_.peak;
      return !control_.stop(peak, std::min(peak, std::max(result_.lower_bound, bound_of(bound))));
    };
    const std::vector<double> start = result_.peak <= target ? program.encode(result_.order) : std::vector<double>{};
    const MipResult answer = highs_.solve(program.program(), mip, start);
    result_.figures.num_nodes += answer.num_nodes;
    rounding_bytes_ = program.max_rounding_bytes();
    if (answer.status == MipStatus::kInfeasible) return rule_out(target);
    contradiction_.clear();
    if (!answer.values.empty()) accept(program, answer);
    if (contradiction_.empty()) raise_bound(bound_of(answer.bound));
  }

  void rule_out(Bytes target) {
    if (result_.peak <= target) {
      throw SolverError("the program has no order with a peak of at most " + bytes_text(target) + ", but the start has one of " +
                        bytes_text(result_.peak) + ": HiGHS exceeded its tolerances");
    }
    raise_bound(above(target));
  }

  // The order of an answer, simulated. Floating point must not decide: of an answer that its own order contradicts nothing is
  // believed, but an order that is better than claimed is kept.
  void accept(const OrderProgram& program, const MipResult& answer) {
    std::vector<OpId> order = program.decode(answer.values);
    if (!graph_.is_order(order)) throw SolverError("the answer of HiGHS is no order of the ops: its tolerances were exceeded");
    const Bytes peak = profile(graph_, order).peak, claimed = program.peak_bytes(answer.objective);
    if (peak < result_.lower_bound) {
      throw SolverError("the lower bound of " + bytes_text(result_.lower_bound) + " is false: an order has a peak of " +
                        bytes_text(peak));
    }
    if (peak > claimed + program.max_rounding_bytes() || (answer.status == MipStatus::kOptimal && peak < claimed)) {
      contradiction_ = "HiGHS claims a peak of " + bytes_text(claimed) + ", its order has one of " + bytes_text(peak);
    }
    if (peak >= result_.peak) return;
    result_.order = std::move(order);
    result_.peak = peak;
  }

  void raise_bound(Bytes bound) { result_.lower_bound = std::min(result_.peak, std::max(result_.lower_bound, bound)); }
  Bytes above(Bytes target) const { return round_up_to_grid(graph_, target + 1); }

  const Graph& graph_;
  const Highs& highs_;
  const OrderIlpOptions& options_;
  Control& control_;
  OrderIlpResult& result_;
  bool too_large_ = false;
  std::string contradiction_;  // what is wrong with the last answer
  Bytes rounding_bytes_ = 0;
};

std::string message_of(const Search& search, const OrderIlpResult& result, const OrderIlpOptions& options, const Control& control) {
  if (result.peak == result.lower_bound) return "proved: no order has a lower peak";
  if (search.too_large()) {
    return "the ordering program was not built: it needs about " + std::to_string(result.figures.num_nonzeros) + " entries for " +
           std::to_string(result.order.size()) + " ops, the limit is " + std::to_string(options.max_nonzeros) +
           " entries and a gigabyte; order windows of the graph";
  }
  if (control.cancelled()) return "stopped on request";
  if (search.rounding_bytes() > 0) {
    return "sizes were rounded for HiGHS: the bound is up to " + bytes_text(search.rounding_bytes()) + " below the least peak";
  }
  return "time limit reached; a longer one may close the gap";
}

}  // namespace

OrderIlpResult order_ilp(const Graph& graph, std::span<const OpId> start, Bytes lower_bound, const Highs& highs,
                         const OrderIlpOptions& options, Control& control) {
  if (!graph.is_order(start)) throw PlanError("the start breaks a dependency or is no permutation of the ops", "order", {});
  OrderIlpResult result;
  result.order.assign(start.begin(), start.end());
  result.peak = profile(graph, start).peak;
  result.lower_bound =
      round_up_to_grid(graph, std::max(lower_bound, options.reduce ? simple_bound(graph) : graph.resident_bytes()));
  if (result.lower_bound > result.peak) {
    throw SolverError("the lower bound of " + bytes_text(lower_bound) + " is false: the start has a peak of " +
                      bytes_text(result.peak));
  }
  Search search(graph, highs, options, control, result);
  // Bounds are tight as a rule, and a low target rules out most of the program: first ask for an order that meets the bound.
  if (result.peak > result.lower_bound && options.reduce) search.solve(result.lower_bound, 0.5 * control.seconds_left());
  constexpr int kAttempts = 3;
  for (int i = 0; i < kAttempts && result.peak > result.lower_bound && !search.too_large(); ++i) {
    if (control.stop(result.peak, result.lower_bound)) break;
    search.solve(result.peak, control.seconds_left());
    if (search.contradiction().empty()) break;
  }
  // Rounded sizes leave a gap of at most the rounding: the same without rounding, for orders that are strictly better.
  while (search.rounding_bytes() > 0 && result.peak > result.lower_bound && search.contradiction().empty() && !search.too_large() &&
         result.peak - result.lower_bound <= search.rounding_bytes() && !control.stop(result.peak, result.lower_bound)) {
    const Bytes before = result.peak;
    search.solve(result.peak - 1, control.seconds_left(), true);
    if (result.peak == before) break;
  }
  if (!search.contradiction().empty() && result.peak > result.lower_bound) {
    throw SolverError("false optimum: " + search.contradiction());
  }
  if (result.peak == result.lower_bound) result.status = Status::kOptimal;
  result.figures.message = message_of(search, result, options, control);
  return result;
}

}  // namespace olla
