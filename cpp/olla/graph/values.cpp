#include "olla/graph/values.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"
#include "olla/base/marks.hpp"

namespace olla {
namespace {

void check_rules(const Graph& graph, const Rules& rules) {
  const auto num_ops = static_cast<std::size_t>(graph.num_ops());
  const bool fits = rules.seconds.size() == num_ops && rules.rerun.size() == num_ops && rules.rerun_seconds.size() == num_ops &&
                    rules.in_place.size() == num_ops && rules.rerun_reads.size() == graph.num_ops() &&
                    (rules.fusion.empty() || (rules.fusion.size() == num_ops && rules.store_seconds.size() == num_ops)) &&
                    (rules.keep_seconds.empty() || rules.keep_seconds.size() == num_ops) &&
                    (rules.unsaved.empty() || rules.unsaved.size() == num_ops);
  if (!fits) throw GraphError("the rules of recomputation need one entry per op", "lengths", {});
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    if (!(rules.seconds[v] >= 0) || !(rules.rerun_seconds[v] >= 0)) {
      throw GraphError("op " + std::to_string(v) + " has negative seconds", "sizes", {v});
    }
    for (const TensorId t : rules.rerun_reads[v]) {
      if (t >= 0 && t < graph.num_tensors()) continue;
      throw GraphError("the rerun of op " + std::to_string(v) + " reads an unknown tensor", "ids", {v, t});
    }
  }
}

}  // namespace

Values::Values(const Graph& graph, const Rules& rules) {
  check_rules(graph, rules);
  number(graph, rules);
  add_reruns(graph, rules);
}

void Values::number(const Graph& graph, const Rules& rules) {
  const GraphData& d = graph.data();
  std::vector<ValueId> held(graph.num_tensors(), kNoValue);  // by each tensor so far
  auto make = [&](TensorId t, OpId by) {
    held[t] = num_values();
    tensor.push_back(t);
    producer.push_back(by);
    return held[t];
  };
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.producer(t) == kNoOp) make(t, kNoOp);
  }
  std::vector<ValueId> used, changed, made;
  Marks listed(graph.num_tensors());
  auto held_by = [&](std::span<const TensorId> tensors, std::vector<ValueId>& list) {
    list.clear();
    listed.clear();
    for (const TensorId t : tensors) {
      if (listed.add(t)) list.push_back(held[t]);
    }
  };
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    held_by(d.reads[v], used);
    held_by(d.mutates[v], changed);
    made.clear();
    for (const TensorId t : d.writes[v]) {
      if (held[t] == kNoValue) made.push_back(make(t, v));
    }
    for (const ValueId old : changed) made.push_back(make(tensor[old], v));
    const bool elsewhere =
        rules.in_place[v] != 0 && changed.size() == 1 && made.size() == 1 && graph.producer(tensor[changed[0]]) != kNoOp;
    if (elsewhere) {
      if (std::find(used.begin(), used.end(), changed[0]) == used.end()) used.push_back(changed[0]);
      changed.clear();
    }
    reads.push_back(used);
    overwrites.push_back(changed);
    makes.push_back(made);
  }
  output.assign(num_values(), 0);
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (held[t] != kNoValue && graph.output(t)) output[held[t]] = 1;
  }

  last = std::move(held);
  readers = transposed(united(reads, overwrites), num_values());
}

void Values::add_reruns(const Graph& graph, const Rules& rules) {
  std::vector<ValueId> list, value_of(graph.num_tensors(), kNoValue);  // of the tensors that the op reads or makes
  replays.assign(graph.num_ops(), kNot);
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    auto rerun = static_cast<Rerun>(rules.rerun[v]);
    const auto lasting = [&](ValueId x) { return graph.producer(tensor[x]) == kNoOp; };
    const auto over = overwrites[v];
    const bool whole = rerun == Rerun::kWhole || rerun == Rerun::kReplay;
    if (makes[v].empty() || (whole && std::any_of(over.begin(), over.end(), lasting))) rerun = Rerun::kNever;
    if (rerun == Rerun::kReplay) {
      replays[v] = rules.rerun_reads[v].empty() || !over.empty() ? kWholeOnly : kWholeOrFirst;
      if (replays[v] == kWholeOnly) rerun = Rerun::kWhole;
    }
    const std::span<const ValueId> none;
    if (rerun == Rerun::kNever) {
      rerun_reads.push_back(none), rerun_overwrites.push_back(none), rerun_makes.push_back(none);
    } else if (rerun == Rerun::kWhole) {
      rerun_reads.push_back(reads[v]), rerun_overwrites.push_back(over), rerun_makes.push_back(makes[v]);
    } else {
      list.clear();
      for (const ValueId x : reads[v]) value_of[tensor[x]] = x;
      for (const ValueId x : makes[v]) value_of[tensor[x]] = x;
      for (const TensorId t : rules.rerun_reads[v]) {
        if (value_of[t] == kNoValue) {
          throw GraphError("the rerun of op " + std::to_string(v) + " reads tensor " + std::to_string(t) +
                               ", which that op neither reads nor writes",
                           "ids", {v, t});
        }
        list.push_back(value_of[t]);
      }
      for (const ValueId x : reads[v]) value_of[tensor[x]] = kNoValue;
      for (const ValueId x : makes[v]) value_of[tensor[x]] = kNoValue;
      rerun_reads.push_back(list), rerun_overwrites.push_back(none);
      rerun_makes.push_back(rerun == Rerun::kReplay ? makes[v] : makes[v].first(1));
    }
  }
}

}  // namespace olla
