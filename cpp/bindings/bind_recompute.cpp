#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "olla/recompute/recompute.hpp"

namespace olla::bindings {
namespace {

struct Curve {
  std::vector<Point> points;
};

template <class T>
std::vector<T> copy_if(const std::optional<Array<T>>& array) {
  return array ? copy(*array) : std::vector<T>{};
}

void bind_rules(nb::module_& m) {
  nb::class_<Rules>(m, "CoreRules", "What may be done with each op, and what it costs; see cpp/olla/graph/values.hpp.")
      .def(
          "__init__",
          [](Rules* self, Array<double> seconds, Array<std::uint8_t> rerun, Array<double> rerun_seconds, const Lists& rerun_reads,
             Array<std::uint8_t> in_place, std::optional<Array<std::uint8_t>> fusion, std::optional<Array<double>> store_seconds,
             std::optional<Array<double>> keep_seconds, std::optional<Array<std::uint8_t>> unsaved, bool reduced_in_place,
             Step split) {
            new (self) Rules{copy(seconds),
                             copy(rerun),
                             copy(rerun_seconds),
                             csr(rerun_reads),
                             copy(in_place),
                             copy_if(fusion),
                             copy_if(store_seconds),
                             copy_if(keep_seconds),
                             copy_if(unsaved),
                             reduced_in_place,
                             split};
          },
          nb::kw_only(), "seconds"_a.noconvert(), "rerun"_a.noconvert(), "rerun_seconds"_a.noconvert(), "rerun_reads"_a.noconvert(),
          "in_place"_a.noconvert(), "fusion"_a.noconvert().none(), "store_seconds"_a.noconvert().none(),
          "keep_seconds"_a.noconvert().none(), "unsaved"_a.noconvert().none(), "reduced_in_place"_a, "split"_a);
}

void bind_answers(nb::module_& m) {
  nb::class_<Values>(m, "Values", "What tensors hold between two mutations; see cpp/olla/graph/values.hpp.")
      .def_prop_ro("tensor", array<const Values>(&Values::tensor), "int32[values]: the tensor that holds it.")
      .def_prop_ro("producer", array<const Values>(&Values::producer), "int32[values]: the op that makes it; -1: none.")
      .def_prop_ro("reads", lists<const Values>(&Values::reads), "Of op v, as (offset, item), like all that follow.")
      .def_prop_ro("overwrites", lists<const Values>(&Values::overwrites))
      .def_prop_ro("makes", lists<const Values>(&Values::makes))
      .def_prop_ro("rerun_makes", lists<const Values>(&Values::rerun_makes));
  nb::class_<Curve>(m, "GreedyCurve", "The state after every step of the greedy.")
      .def_prop_ro("peak_bytes", column(&Curve::points, &Point::peak), kOwned)
      .def_prop_ro("added_seconds", column(&Curve::points, &Point::added_seconds), kOwned)
      .def_prop_ro("num_decisions", column(&Curve::points, &Point::num_decisions), kOwned, "In force.");
  nb::class_<Decisions>(m, "Decisions", "Drops in force; decision i is those from offset[i] to offset[i + 1].")
      .def_prop_ro("values", array<Decisions>(&Decisions::values), "int32[drops]: not kept past steps[d].")
      .def_prop_ro("steps", array<Decisions>(&Decisions::steps))
      .def_prop_ro("offset", array<Decisions>(&Decisions::offset));
  nb::class_<Runs>(m, "Runs", "What runs under the decisions in force, in order, and the copies of values that this makes.")
      .def_prop_ro("op", array<Runs>(&Runs::op), "int32[runs].")
      .def_prop_ro("position", array<Runs>(&Runs::position), "int32[runs]: the base step it serves.")
      .def_prop_ro("again", array<Runs>(&Runs::again), "uint8[runs]: 0 in its own place in the base order.")
      .def_prop_ro("live_bytes", array<Runs>(&Runs::live), "int64[runs].")
      .def_prop_ro("reads", lists<Runs>(&Runs::reads), "Copies that run r reads, as (offset, item).")
      .def_prop_ro("makes", lists<Runs>(&Runs::makes), "Copies that it makes.")
      .def_prop_ro("value", array<Runs>(&Runs::value), "int32[copies].")
      .def_prop_ro("fused", array<Runs>(&Runs::fused), "uint8[copies]: 1 where it is in no memory.");
  using R = Rewritten;
  nb::class_<R>(m, "Rewritten", "The graph that decisions make, as columns like those of Graph, and where it comes from.")
      .def_prop_ro("tensor_bytes", array<R>(&R::data, &GraphData::tensor_bytes))
      .def_prop_ro("donated", array<R>(&R::data, &GraphData::donated))
      .def_prop_ro("reads", lists<R>(&R::data, &GraphData::reads))
      .def_prop_ro("writes", lists<R>(&R::data, &GraphData::writes))
      .def_prop_ro("mutates", lists<R>(&R::data, &GraphData::mutates))
      .def_prop_ro("after", lists<R>(&R::data, &GraphData::after))
      .def_prop_ro("workspace_bytes", array<R>(&R::data, &GraphData::workspace_bytes))
      .def_prop_ro("random", array<R>(&R::data, &GraphData::random))
      .def_prop_ro("outputs", array<R>(&R::data, &GraphData::outputs))
      .def_prop_ro("origin", array<R>(&R::origin), "int32[ops]: the op of the original graph.")
      .def_prop_ro("rerun", array<R>(&R::rerun), "uint8[ops]: how it is recomputed, a Rerun; 0: in its own place.")
      .def_prop_ro("tensor_origin", array<R>(&R::tensor_origin), "int32[tensors]: the original tensor that it holds first.");
}

}  // namespace

void bind_recompute(nb::module_& m) {
  bind_rules(m);
  nb::class_<Target>(
      m, "RecomputeTarget",
      "Either the least added time within a peak, or the least peak within an added time; of an integer program, the "
      "other one is a proven bound.")
      .def(nb::init<bool, Bytes, double>(), nb::kw_only(), "least_time"_a, "peak"_a, "added_seconds"_a);
  bind_answers(m);
  nb::class_<RecomputeSearch>(m, "CoreRecomputeSearch", "Which values not to keep, on top of a base order; see olla.recompute.")
      .def(
          "__init__",
          [](RecomputeSearch* self, const Graph& graph, Array<OpId> order, const Rules& rules) {
            new (self) RecomputeSearch(graph, rules, copy(order));
          },
          nb::keep_alive<1, 2>(), "graph"_a, "order"_a.noconvert(), "rules"_a)
      .def(
          "run",
          [](RecomputeSearch& self, Bytes peak, double added_seconds, const Limits& limits) {
            return limited("budget", limits, [&](Control& control) { self.evictor().run({peak, added_seconds}, control); });
          },
          "peak"_a, "added_seconds"_a, "limits"_a,
          "Drop greedily until the peak is reached or a limit is met; whether it was cancelled.")
      .def(
          "improve",
          [](RecomputeSearch& self, const Target& target, const std::vector<OpId>& ops, int max_rounds, std::uint64_t seed,
             const Limits& limits) {
            return limited("improve", limits, [&](Control& control) { self.improve(target, seed, max_rounds, ops, control); });
          },
          "target"_a, "ops"_a, "max_rounds"_a, "seed"_a, "limits"_a,
          "Search around the decisions in force, and those that the bounds of ops suggest, for less time within the peak, or less "
          "peak within the time; whether cancelled.")
      .def(
          "reverse",
          [](RecomputeSearch& self, Bytes most, Bytes least, double time_limit, std::int64_t max_work) {
            return limited("reverse", {time_limit, max_work, nb::none()},
                           [&](Control& control) { self.evictor().reverse(most, control, least); });
          },
          "most"_a, "least"_a, "time_limit"_a, "max_work"_a,
          "Take drops back, dearest first, where the peak stays between the limits and no time is added.")
      .def(
          "curve", [](const RecomputeSearch& self) { return Curve{self.evictor().curve()}; },
          "The state after every step of the greedy.")
      .def(
          "front", [](const RecomputeSearch& self) { return Curve{self.evictor().front().points()}; },
          "All choices that were simulated and that no other one is better than; rising peaks.")
      .def("recall", &RecomputeSearch::recall, "target"_a,
           "Put the best choice in force that was ever simulated and meets the target's limit; false where there is none.")
      .def(
          "least_peak",
          [](RecomputeSearch& self, Array<OpId> ops, double added_seconds, double time_limit, nb::object progress) {
            auto found = search("bound", {time_limit, {}, std::move(progress)},
                                [&](Control& control) { return self.least_peak(view(ops), added_seconds, control); });
            return std::pair(to_numpy<Bytes>(std::move(found)), found.cancelled);
          },
          "ops"_a.noconvert(), "added_seconds"_a, "time_limit"_a, "progress"_a.none(),
          "(bounds, cancelled): no rewriting that adds at most added_seconds has a lower peak than any of the bounds, one per op.")
      .def(
          "least_added_seconds",
          [](RecomputeSearch& self, Array<OpId> ops, Bytes peak, double time_limit, nb::object progress) {
            auto found = search("bound", {time_limit, {}, std::move(progress)},
                                [&](Control& control) { return self.least_added_seconds(view(ops), peak, control); });
            return std::pair(to_numpy<double>(std::move(found)), found.cancelled);
          },
          "ops"_a.noconvert(), "peak"_a, "time_limit"_a, "progress"_a.none(),
          "(bounds, cancelled): no rewriting with at most this peak adds less than any of the bounds, one per op.")
      .def(
          "reset",
          [](RecomputeSearch& self, Array<ValueId> values, Array<Step> steps) { return self.reset(view(values), view(steps)); },
          "values"_a.noconvert(), "steps"_a.noconvert(),
          "Put other drops in force: value i is not kept past steps[i]; false, and none are, if one can neither be kept nor made.")
      .def(
          "set_absent", [](RecomputeSearch& self, Array<Bytes> absent) { self.set_absent(copy(absent)); }, "absent"_a.noconvert(),
          "Bytes that are in host memory while each base step runs, and count nothing.")
      .def(
          "made_again",
          [](RecomputeSearch& self, OpId op, double price, double time_limit) {
            return to_numpy<ValueId>(search("seed", {time_limit, {}, nb::none()},
                                            [&](Control& control) { return self.bound().made_again(op, price, control); }));
          },
          "op"_a, "price"_a, "time_limit"_a,
          "Values that the cheapest way to go on after the op makes again, at a price of time in bytes per second.")
      .def("decisions", &RecomputeSearch::decisions, "The drops in force.")
      .def("runs", &RecomputeSearch::runs, "What runs under the decisions in force.")
      .def("rewritten", &RecomputeSearch::rewritten, "The graph that the decisions in force make; not of fused ops.")
      .def_prop_ro("values", &RecomputeSearch::values)
      .def_prop_ro("peak", [](const RecomputeSearch& self) { return self.evictor().rewrite().peak; })
      .def_prop_ro("added_seconds", [](const RecomputeSearch& self) { return self.evictor().rewrite().added_seconds; });
}

}  // namespace olla::bindings
