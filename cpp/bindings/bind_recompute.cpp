#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ilp_figures.hpp"
#include "olla/ilp/recompute_ilp.hpp"
#include "olla/recompute/recompute.hpp"

namespace olla::bindings {
namespace {

nb::tuple lists(Csr<std::int32_t> csr) { return nb::make_tuple(to_numpy(std::move(csr.offset)), to_numpy(std::move(csr.item))); }

// Runs work(control) without the GIL; true if Ctrl-C or progress ended it.
template <class Work>
bool limited(const char* stage, double time_limit, std::int64_t max_work, nb::object progress, Work work) {
  PythonProgress callback(std::move(progress));
  Control control(stage, time_limit, callback.function(), max_work);
  {
    nb::gil_scoped_release release;
    work(control);
  }
  callback.raise_pending();
  return control.cancelled();
}

nb::tuple solve(RecomputeSearch& self, bool least_time, Bytes peak, double added_seconds, const std::string& highs_library,
                double time_limit, std::int32_t seed, std::int32_t num_threads, nb::object progress) {
  RecomputeIlpResult result;
  IlpOptions options;
  options.seed = seed;
  options.num_threads = num_threads;
  const bool cancelled = limited("budget_ilp", time_limit, kAnyWork, std::move(progress), [&](Control& control) {
    const RecomputeTarget target{least_time, peak, added_seconds};
    const Highs highs(highs_library);
    result = recompute_ilp(self.evictor(), self.graph(), self.values(), self.rules(), self.base(), target, highs, options, control);
  });
  nb::dict info = dict_of(result.figures);
  info["cancelled"] = cancelled;
  info["pruned"] = result.pruned;
  info["num_answers"] = result.num_answers;
  const char* status = result.status == Status::kInfeasible ? "infeasible" : name_of(result.status);
  return nb::make_tuple(status, result.bound, info);
}

}  // namespace

void bind_recompute(nb::module_& m) {
  nb::class_<RecomputeSearch>(m, "Evictor", "Which values not to keep, on top of a base order; see olla.recompute.")
      .def(
          "__init__",
          [](RecomputeSearch* self, const Graph& graph, Array<OpId> order, Array<double> seconds, Array<std::uint8_t> rerun,
             Array<double> rerun_seconds, Array<std::int64_t> rerun_offset, Array<TensorId> rerun_reads,
             Array<std::uint8_t> in_place, std::optional<Array<std::uint8_t>> fusion, std::optional<Array<double>> store_seconds,
             std::optional<Array<double>> keep_seconds, std::optional<Array<std::uint8_t>> unsaved, Step split) {
            Rules rules{copy(seconds),
                        copy(rerun),
                        copy(rerun_seconds),
                        {copy(rerun_offset), copy(rerun_reads)},
                        copy(in_place),
                        fusion ? copy(*fusion) : std::vector<std::uint8_t>{},
                        store_seconds ? copy(*store_seconds) : std::vector<double>{},
                        keep_seconds ? copy(*keep_seconds) : std::vector<double>{},
                        unsaved ? copy(*unsaved) : std::vector<std::uint8_t>{},
                        split};
            new (self) RecomputeSearch(graph, std::move(rules), copy(order));
          },
          nb::keep_alive<1, 2>(), "graph"_a, "order"_a.noconvert(), "seconds"_a.noconvert(), "rerun"_a.noconvert(),
          "rerun_seconds"_a.noconvert(), "rerun_offset"_a.noconvert(), "rerun_reads"_a.noconvert(), "in_place"_a.noconvert(),
          "fusion"_a.noconvert() = nb::none(), "store_seconds"_a.noconvert() = nb::none(),
          "keep_seconds"_a.noconvert() = nb::none(), "unsaved"_a.noconvert() = nb::none(), "split"_a = 0)
      .def(
          "run",
          [](RecomputeSearch& self, Bytes peak, double added_seconds, double time_limit, nb::object progress,
             std::int64_t max_work) {
            return limited("budget", time_limit, max_work, std::move(progress),
                           [&](Control& control) { self.evictor().run({peak, added_seconds}, control); });
          },
          "peak"_a, "added_seconds"_a, "time_limit"_a, "progress"_a.none(), "max_work"_a = kAnyWork,
          "Drop greedily until the peak is reached or a limit is met; whether it was cancelled.")
      .def(
          "improve",
          [](RecomputeSearch& self, bool least_time, Bytes peak, double added_seconds, std::uint64_t seed, int max_rounds,
             double time_limit, nb::object progress, std::int64_t max_work, const std::vector<OpId>& ops) {
            return limited("improve", time_limit, max_work, std::move(progress), [&](Control& control) {
              self.improve({least_time, peak, added_seconds}, seed, max_rounds, ops, control);
            });
          },
          "least_time"_a, "peak"_a, "added_seconds"_a, "seed"_a, "max_rounds"_a, "time_limit"_a, "progress"_a.none(),
          "max_work"_a = kAnyWork, "ops"_a = std::vector<OpId>{},
          "Search around the decisions in force, and those that the bounds of ops suggest, for less time within the peak, or less "
          "peak within the time; whether cancelled.")
      .def(
          "reverse",
          [](RecomputeSearch& self, Bytes most, Bytes least, double time_limit, std::int64_t max_work) {
            return limited("reverse", time_limit, max_work, nb::none(),
                           [&](Control& control) { self.evictor().reverse(most, control, least); });
          },
          "most"_a, "least"_a, "time_limit"_a, "max_work"_a = kAnyWork,
          "Take drops back, dearest first, where the peak stays between the limits and no time is added.")
      .def("solve", &solve, "least_time"_a, "peak"_a, "added_seconds"_a, "highs_library"_a, "time_limit"_a, "seed"_a,
           "num_threads"_a, "progress"_a.none(),
           "(status, bound, info): the best decisions for the base order by integer program; see olla.recompute.ilp.")
      .def(
          "curve",
          [](const RecomputeSearch& self) {
            std::vector<Bytes> peak;
            std::vector<double> seconds;
            std::vector<std::int64_t> num_decisions;
            for (const Point& point : self.evictor().curve()) {
              peak.push_back(point.peak);
              seconds.push_back(point.added_seconds);
              num_decisions.push_back(static_cast<std::int64_t>(point.num_decisions));
            }
            return nb::make_tuple(to_numpy(std::move(peak)), to_numpy(std::move(seconds)), to_numpy(std::move(num_decisions)));
          },
          "(peak, added_seconds, num_decisions in force) after every step of the greedy.")
      .def(
          "least_peak",
          [](RecomputeSearch& self, Array<OpId> ops, double added_seconds, double time_limit, nb::object progress) {
            std::vector<Bytes> bounds;
            const bool cancelled = limited("bound", time_limit, kAnyWork, std::move(progress),
                                           [&](Control& control) { bounds = self.least_peak(view(ops), added_seconds, control); });
            return nb::make_tuple(to_numpy(std::move(bounds)), cancelled);
          },
          "ops"_a.noconvert(), "added_seconds"_a, "time_limit"_a, "progress"_a.none(),
          "(bounds, cancelled): no rewriting that adds at most added_seconds has a lower peak than any of the bounds, one per op.")
      .def(
          "least_added_seconds",
          [](RecomputeSearch& self, Array<OpId> ops, Bytes peak, double time_limit, nb::object progress) {
            std::vector<double> bounds;
            const bool cancelled = limited("bound", time_limit, kAnyWork, std::move(progress),
                                           [&](Control& control) { bounds = self.least_added_seconds(view(ops), peak, control); });
            return nb::make_tuple(to_numpy(std::move(bounds)), cancelled);
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
      .def_prop_ro(
          "drops",
          [](const RecomputeSearch& self) {
            Decisions all = self.decisions();
            return nb::make_tuple(to_numpy(std::move(all.values)), to_numpy(std::move(all.steps)));
          },
          "(values, steps) in force, as `reset` takes them.")
      .def(
          "made_again",
          [](RecomputeSearch& self, OpId op, double price, double time_limit) {
            std::vector<ValueId> values;
            limited("seed", time_limit, kAnyWork, nb::none(),
                    [&](Control& control) { values = self.bound().made_again(op, price, control); });
            return to_numpy(std::move(values));
          },
          "op"_a, "price"_a, "time_limit"_a,
          "Values that the cheapest way to go on after the op makes again, at a price of time in bytes per second.")
      .def(
          "decisions",
          [](const RecomputeSearch& self) {
            Decisions all = self.decisions();
            return nb::make_tuple(to_numpy(std::move(all.values)), to_numpy(std::move(all.steps)), to_numpy(std::move(all.offset)));
          },
          "(values, steps, offset) of the drops in force; decision i is those from offset[i] to offset[i + 1].")
      .def(
          "runs",
          [](const RecomputeSearch& self) {
            Runs all = self.runs();
            nb::dict runs;
            runs["op"] = to_numpy(std::move(all.op));
            runs["position"] = to_numpy(std::move(all.position));
            runs["again"] = to_numpy(std::move(all.again));
            runs["live"] = to_numpy(std::move(all.live));
            runs["reads"] = lists(std::move(all.reads));
            runs["makes"] = lists(std::move(all.makes));
            runs["value"] = to_numpy(std::move(all.value));
            runs["fused"] = to_numpy(std::move(all.fused));
            return runs;
          },
          "What runs under the decisions in force, in order: op, base step it serves, whether again, live bytes, copies it reads\n"
          "and makes; of every copy its value, and whether it is fused away.")
      .def_prop_ro(
          "values",
          [](const RecomputeSearch& self) {
            nb::dict values;
            values["tensor"] = to_numpy(std::vector<TensorId>(self.values().tensor));
            values["producer"] = to_numpy(std::vector<OpId>(self.values().producer));
            values["reads"] = lists(Csr<ValueId>(self.values().reads));
            values["overwrites"] = lists(Csr<ValueId>(self.values().overwrites));
            values["makes"] = lists(Csr<ValueId>(self.values().makes));
            values["rerun_makes"] = lists(Csr<ValueId>(self.values().rerun_makes));
            return values;
          },
          "What tensors hold between two mutations; see cpp/olla/graph/values.hpp.")
      .def_prop_ro("peak", [](const RecomputeSearch& self) { return self.evictor().rewrite().peak; })
      .def_prop_ro("added_seconds", [](const RecomputeSearch& self) { return self.evictor().rewrite().added_seconds; })
      .def(
          "rewritten",
          [](RecomputeSearch& self) {
            Rewritten r = self.rewritten();
            nb::dict graph;
            graph["tensor_bytes"] = to_numpy(std::move(r.data.tensor_bytes));
            graph["donated"] = to_numpy(std::move(r.data.donated));
            graph["reads"] = lists(std::move(r.data.reads));
            graph["writes"] = lists(std::move(r.data.writes));
            graph["mutates"] = lists(std::move(r.data.mutates));
            graph["after"] = lists(std::move(r.data.after));
            graph["workspace_bytes"] = to_numpy(std::move(r.data.workspace_bytes));
            graph["random"] = to_numpy(std::move(r.data.random));
            graph["outputs"] = to_numpy(std::move(r.data.outputs));
            return nb::make_tuple(graph, to_numpy(std::move(r.origin)), to_numpy(std::move(r.rerun)),
                                  to_numpy(std::move(r.tensor_origin)));
          },
          "(columns, origin, rerun, tensor_origin) of the graph that the decisions in force make.");
}

}  // namespace olla::bindings
