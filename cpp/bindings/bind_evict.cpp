#include <nanobind/stl/string.h>

#include "ilp_figures.hpp"
#include "olla/budget_ilp.hpp"
#include "olla/improve.hpp"
#include "olla/spend.hpp"

namespace olla::bindings {
namespace {

// Owns what an Evictor only refers to. Python keeps the graph alive.
struct Search {
  const Graph& graph;
  Rules rules;
  Values values;
  std::vector<OpId> base;
  Evictor evictor;
  Spending spending;

  Search(const Graph& of, Rules given, std::vector<OpId> order)
      : graph(of),
        rules(std::move(given)),
        values(graph, rules),
        base(std::move(order)),
        evictor(graph, values, rules, base),
        spending(graph, values, rules) {}
};

nb::tuple lists(Csr<std::int32_t> csr) { return nb::make_tuple(to_numpy(std::move(csr.offset)), to_numpy(std::move(csr.item))); }

// Runs work(control) without the GIL; true if Ctrl-C or progress ended it.
template <class Work>
bool limited(const char* stage, double time_limit, nb::object progress, Work work) {
  PythonProgress callback(std::move(progress));
  Control control(stage, time_limit, callback.function());
  {
    nb::gil_scoped_release release;
    work(control);
  }
  callback.raise_pending();
  return control.cancelled();
}

nb::tuple solve(Search& self, bool least_time, Bytes peak, double added_seconds, const std::string& highs_library,
                double time_limit, std::int32_t seed, std::int32_t num_threads, nb::object progress) {
  BudgetIlpResult result;
  IlpOptions options;
  options.seed = seed;
  options.num_threads = num_threads;
  const bool cancelled = limited("budget_ilp", time_limit, std::move(progress), [&](Control& control) {
    const BudgetTarget target{least_time, peak, added_seconds};
    const Highs highs(highs_library);
    result = budget_ilp(self.evictor, self.graph, self.values, self.rules, self.base, target, highs, options, control);
  });
  nb::dict info = dict_of(result.figures);
  info["cancelled"] = cancelled;
  info["pruned"] = result.pruned;
  info["num_answers"] = result.num_answers;
  const char* status = result.status == Status::kInfeasible ? "infeasible" : name_of(result.status);
  return nb::make_tuple(status, result.bound, info);
}

}  // namespace

void bind_evict(nb::module_& m) {
  nb::class_<Search>(m, "Evictor", "Which values not to keep, on top of a base order; see olla.budget.")
      .def(
          "__init__",
          [](Search* self, const Graph& graph, Array<OpId> order, Array<double> seconds, Array<std::uint8_t> rerun,
             Array<double> rerun_seconds, Array<std::int64_t> rerun_offset, Array<TensorId> rerun_reads,
             Array<std::uint8_t> in_place) {
            if (!graph.is_order(view(order))) throw GraphError("the base order is no order of the graph", "program_order", {});
            Rules rules{copy(seconds), copy(rerun), copy(rerun_seconds), {copy(rerun_offset), copy(rerun_reads)}, copy(in_place)};
            new (self) Search(graph, std::move(rules), copy(order));
          },
          nb::keep_alive<1, 2>(), "graph"_a, "order"_a.noconvert(), "seconds"_a.noconvert(), "rerun"_a.noconvert(),
          "rerun_seconds"_a.noconvert(), "rerun_offset"_a.noconvert(), "rerun_reads"_a.noconvert(), "in_place"_a.noconvert())
      .def(
          "run",
          [](Search& self, Bytes peak, double added_seconds, double time_limit, nb::object progress) {
            return limited("budget", time_limit, std::move(progress),
                           [&](Control& control) { self.evictor.run({peak, added_seconds}, control); });
          },
          "peak"_a, "added_seconds"_a, "time_limit"_a, "progress"_a.none(),
          "Drop greedily until the peak is reached or a limit is met; whether it was cancelled.")
      .def(
          "improve",
          [](Search& self, bool least_time, Bytes peak, double added_seconds, std::uint64_t seed, int max_rounds, double time_limit,
             nb::object progress) {
            return limited("improve", time_limit, std::move(progress), [&](Control& control) {
              improve(self.evictor, {least_time, peak, added_seconds}, seed, max_rounds, control);
            });
          },
          "least_time"_a, "peak"_a, "added_seconds"_a, "seed"_a, "max_rounds"_a, "time_limit"_a, "progress"_a.none(),
          "Search around the decisions in force for less time within the peak, or less peak within the time; whether cancelled.")
      .def("solve", &solve, "least_time"_a, "peak"_a, "added_seconds"_a, "highs_library"_a, "time_limit"_a, "seed"_a,
           "num_threads"_a, "progress"_a.none(),
           "(status, bound, info): the best decisions for the base order by integer program; see olla.budgetilp.")
      .def(
          "curve",
          [](const Search& self) {
            std::vector<Bytes> peak;
            std::vector<double> seconds;
            for (const Point& point : self.evictor.curve()) {
              peak.push_back(point.peak);
              seconds.push_back(point.added_seconds);
            }
            return nb::make_tuple(to_numpy(std::move(peak)), to_numpy(std::move(seconds)));
          },
          "(peak, added_seconds) after every step of the greedy.")
      .def(
          "least_peak",
          [](Search& self, Array<OpId> ops, double added_seconds, double time_limit, nb::object progress) {
            std::vector<Bytes> bounds;
            const bool cancelled = limited("bound", time_limit, std::move(progress), [&](Control& control) {
              for (const OpId t : view(ops))
                bounds.push_back(control.stop(0, 0) ? 0 : self.spending.least_peak(t, added_seconds, control));
            });
            return nb::make_tuple(to_numpy(std::move(bounds)), cancelled);
          },
          "ops"_a.noconvert(), "added_seconds"_a, "time_limit"_a, "progress"_a.none(),
          "(bounds, cancelled): no rewriting that adds at most added_seconds has a lower peak than any of the bounds, one per op.")
      .def(
          "least_added_seconds",
          [](Search& self, Array<OpId> ops, Bytes peak, double time_limit, nb::object progress) {
            std::vector<double> bounds;
            const bool cancelled = limited("bound", time_limit, std::move(progress), [&](Control& control) {
              for (const OpId t : view(ops))
                bounds.push_back(control.stop(0, 0) ? 0 : self.spending.least_added_seconds(t, peak, control));
            });
            return nb::make_tuple(to_numpy(std::move(bounds)), cancelled);
          },
          "ops"_a.noconvert(), "peak"_a, "time_limit"_a, "progress"_a.none(),
          "(bounds, cancelled): no rewriting with at most this peak adds less than any of the bounds, one per op.")
      .def(
          "reset",
          [](Search& self, Array<ValueId> values, Array<Step> steps) {
            const auto dropped = view(values);
            const auto last = view(steps);
            if (dropped.size() != last.size()) throw GraphError("drops need one step per value", "lengths", {});
            Decision decision;
            for (std::size_t i = 0; i < dropped.size(); ++i) {
              if (dropped[i] < 0 || dropped[i] >= self.values.num_values()) throw GraphError("a drop names no value", "ids", {});
              decision.push_back({dropped[i], last[i]});
            }
            return self.evictor.reset({decision});
          },
          "values"_a.noconvert(), "steps"_a.noconvert(),
          "Put other drops in force: value i is not kept past steps[i]; false, and none are, if one can neither be kept nor made.")
      .def_prop_ro(
          "values",
          [](const Search& self) {
            nb::dict values;
            values["tensor"] = to_numpy(std::vector<TensorId>(self.values.tensor));
            values["producer"] = to_numpy(std::vector<OpId>(self.values.producer));
            values["reads"] = lists(Csr<ValueId>(self.values.reads));
            values["overwrites"] = lists(Csr<ValueId>(self.values.overwrites));
            values["makes"] = lists(Csr<ValueId>(self.values.makes));
            values["rerun_makes"] = lists(Csr<ValueId>(self.values.rerun_makes));
            return values;
          },
          "What tensors hold between two mutations; see cpp/olla/values.hpp.")
      .def_prop_ro("peak", [](const Search& self) { return self.evictor.rewrite().peak; })
      .def_prop_ro("added_seconds", [](const Search& self) { return self.evictor.rewrite().added_seconds; })
      .def(
          "rewritten",
          [](Search& self) {
            Rewritten r = self.evictor.rewritten();
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
