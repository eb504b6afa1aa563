#include "olla/recompute/recompute.hpp"

#include <algorithm>

#include "olla/base/error.hpp"

namespace olla {
namespace {

std::vector<OpId> checked(const Graph& graph, std::vector<OpId> base) {
  if (!graph.is_order(base)) throw GraphError("the base order is no order of the graph", "program_order", {});
  return base;
}

}  // namespace

RecomputeSearch::RecomputeSearch(const Graph& graph, Rules rules, std::vector<OpId> base)
    : graph_(graph),
      base_(checked(graph, std::move(base))),
      rules_(std::move(rules)),
      values_(graph_, rules_),
      evictor_(graph_, values_, rules_, base_),
      bound_(graph_, values_, rules_) {}

void RecomputeSearch::improve(const Target& target, std::uint64_t seed, int max_rounds, std::span<const OpId> ops,
                              Control& control) {
  std::vector<std::vector<Decision>> starts;
  for (const OpId t : ops) {
    if (control.over()) break;
    if (target.least_time) {
      bound_.least_added_seconds(t, target.peak, control);
    } else {
      bound_.least_peak(t, target.added_seconds, control);
    }
    const auto step = static_cast<Step>(std::find(base_.begin(), base_.end(), t) - base_.begin());
    for (const auto& dropped : bound_.around()) {
      std::vector<Decision> start;
      for (const ValueId x : dropped) start.push_back({{x, step}});
      if (!start.empty()) starts.push_back(std::move(start));
    }
  }
  olla::improve(evictor_, target, seed, max_rounds, control, starts);
}

std::vector<Bytes> RecomputeSearch::least_peak(std::span<const OpId> ops, double added_seconds, Control& control) {
  std::vector<Bytes> bounds;
  for (const OpId t : ops) bounds.push_back(control.stop(0, 0) ? 0 : bound_.least_peak(t, added_seconds, control));
  return bounds;
}

std::vector<double> RecomputeSearch::least_added_seconds(std::span<const OpId> ops, Bytes peak, Control& control) {
  std::vector<double> bounds;
  for (const OpId t : ops) bounds.push_back(control.stop(0, 0) ? 0 : bound_.least_added_seconds(t, peak, control));
  return bounds;
}

bool RecomputeSearch::reset(std::span<const ValueId> values, std::span<const Step> steps) {
  if (values.size() != steps.size()) throw GraphError("drops need one step per value", "lengths", {});
  Decision decision;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= values_.num_values()) throw GraphError("a drop names no value", "ids", {});
    decision.push_back({values[i], steps[i]});
  }
  return evictor_.reset({decision});
}

bool RecomputeSearch::recall(const Target& target) {
  const auto best = evictor_.front().best(target);
  return best && evictor_.reset(best->decisions());
}

void RecomputeSearch::set_absent(std::vector<Bytes> absent) {
  if (absent.size() != base_.size()) throw GraphError("absent bytes need one entry per base step", "lengths", {});
  evictor_.set_absent(std::move(absent));
}

Decisions RecomputeSearch::decisions() const {
  Decisions all;
  for (const Decision& decision : evictor_.decisions()) {
    for (const Drop& drop : decision) all.values.push_back(drop.value), all.steps.push_back(drop.step);
    all.offset.push_back(static_cast<std::int64_t>(all.values.size()));
  }
  return all;
}

Runs RecomputeSearch::runs() const {
  const Rewrite& r = evictor_.rewrite();
  Runs all;
  for (const RunId run : r.alive()) {
    all.op.push_back(r.runs[run].op), all.position.push_back(r.runs[run].position);
    all.again.push_back(r.runs[run].rerun ? 1 : 0), all.live.push_back(r.live[run]);
    all.reads.push_back(r.reads[run]), all.makes.push_back(r.makes[run]);
  }
  for (const auto& copy : r.copies) all.value.push_back(copy.value), all.fused.push_back(copy.fused ? 1 : 0);
  return all;
}

Rewritten RecomputeSearch::rewritten() {
  if (!rules_.fusion.empty()) throw GraphError("fused ops make no graph: take their runs", "fusion", {});
  return evictor_.rewritten();
}

}  // namespace olla
