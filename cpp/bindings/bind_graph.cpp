#include "arrays.hpp"
#include "olla/graph/profile.hpp"
#include "olla/graph/schedule.hpp"
#include "olla/graph/spans.hpp"

namespace olla::bindings {
namespace {

std::vector<Edge> edges(const Array<OpId>& before, const Array<OpId>& after) {
  if (before.size() != after.size()) throw GraphError("precedences need as many ends as beginnings", "lengths", {});
  std::vector<Edge> result;
  for (std::size_t i = 0; i < before.size(); ++i) result.emplace_back(view(before)[i], view(after)[i]);
  return result;
}

}  // namespace

void bind_graph(nb::module_& m) {
  nb::class_<Graph>(m, "CoreGraph", "Dataflow graph of a training step; see olla.Graph.")
      .def(
          "__init__",
          [](Graph* self, Array<Bytes> tensor_bytes, Array<std::uint8_t> donated, const Lists& reads, const Lists& writes,
             const Lists& mutates, const Lists& after, Array<Bytes> workspace_bytes, Array<std::uint8_t> random,
             Array<TensorId> outputs) {
            GraphData data{copy(tensor_bytes), copy(donated),         csr(reads),   csr(writes),  csr(mutates),
                           csr(after),         copy(workspace_bytes), copy(random), copy(outputs)};
            nb::gil_scoped_release release;
            new (self) Graph(std::move(data));
          },
          nb::kw_only(), "tensor_bytes"_a.noconvert(), "donated"_a.noconvert(), "reads"_a.noconvert(), "writes"_a.noconvert(),
          "mutates"_a.noconvert(), "after"_a.noconvert(), "workspace_bytes"_a.noconvert(), "random"_a.noconvert(),
          "outputs"_a.noconvert(), "Lists as (offset, item).")
      .def(
          "constrained",
          [](const Graph& self, Array<OpId> before, Array<OpId> after) {
            return without_gil([&, extra = edges(before, after)] { return self.constrained(extra); });
          },
          "before"_a.noconvert(), "after"_a.noconvert(), "The same graph with precedences before[i] -> after[i] added.")
      .def_prop_ro("num_ops", &Graph::num_ops)
      .def_prop_ro("num_tensors", &Graph::num_tensors)
      .def_prop_ro("resident_bytes", &Graph::resident_bytes)
      .def(
          "preds",
          [](const Graph& self, OpId op) {
            if (op < 0 || op >= self.num_ops()) throw nb::index_error("no such op");
            return to_numpy(std::vector<OpId>(self.preds(op).begin(), self.preds(op).end()));
          },
          "op"_a, "Direct dependencies of an op, sorted.")
      .def(
          "precedences", [](const Graph& self) { return std::pair(to_numpy(self.preds().offset), to_numpy(self.preds().item)); },
          "Direct dependencies of all ops as (offset, item): op v comes after item[offset[v]:offset[v + 1]].")
      .def(
          "is_order", [](const Graph& self, Array<OpId> order) { return self.is_order(view(order)); }, "order"_a.noconvert(),
          "Whether order is a permutation of the ops that respects every dependency.");
  nb::class_<Profile>(m, "Profile", "When tensors are live, and how much memory, under an order.")
      .def_prop_ro("first", array<Profile>(&Profile::lifetimes, &Lifetimes::first),
                   "int32[tensors]: the step from which tensor t is live.")
      .def_prop_ro("last", array<Profile>(&Profile::lifetimes, &Lifetimes::last),
                   "int32[tensors]: the step from which it no longer is.")
      .def_prop_ro("live_bytes", array<Profile>(&Profile::live), "int64[ops], live during step s.")
      .def_ro("peak_bytes", &Profile::peak, "The most of them.")
      .def_ro("peak_step", &Profile::peak_step, "The first step with the most.");
  m.def(
      "profile",
      [](const Graph& graph, Array<OpId> order) {
        return without_gil([&, checked = copy(order)] {  // a copy: the caller's array may change without the GIL
          if (!graph.is_order(checked))
            throw PlanError("the order breaks a dependency or is no permutation of the ops", "order", {});
          return profile(graph, checked);
        });
      },
      "graph"_a, "order"_a.noconvert(), "Lifetimes and memory under an order; see cpp/olla/graph/profile.hpp.");
  m.def(
      "nearest_order", [](const Graph& graph, Array<OpId> wanted) { return to_numpy(nearest_order(graph, view(wanted))); },
      "graph"_a, "wanted"_a.noconvert(),
      "int32[ops]: the valid order that runs, at every step, the ready op that comes first in wanted, a permutation of the ops.");
  m.def(
      "spans",
      [](const Graph& graph) {
        Spans s = without_gil([&] { return spans(graph); });
        return std::pair(to_numpy(std::move(s.earliest)), to_numpy(std::move(s.latest)));
      },
      "graph"_a, "(earliest, latest) step of every op when one op runs per step.");
}

}  // namespace olla::bindings
