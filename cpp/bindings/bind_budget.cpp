#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "olla/evict.hpp"

namespace olla::bindings {
namespace {

struct Budget {
  const Graph& graph;
  Rules rules;
  Values values;
  std::vector<OpId> base;
  Control control{"budget", 1e9, {}};
  Evictor evictor;
  Budget(const Graph& g, Rules r, std::vector<OpId> order)
      : graph(g), rules(std::move(r)), values(graph, rules), base(std::move(order)), evictor(graph, values, rules, base, control) {}
};

}  // namespace

void bind_budget(nb::module_& m) {
  nb::class_<Budget>(m, "Budget")
      .def("__init__",
           [](Budget* self, const Graph& graph, Array<OpId> order, Array<double> seconds, Array<std::uint8_t> rerun,
              Array<double> rerun_seconds, Array<std::int64_t> rerun_offset, Array<TensorId> rerun_reads,
              Array<std::uint8_t> in_place) {
             new (self) Budget(graph,
                               {copy(seconds), copy(rerun), copy(rerun_seconds), {copy(rerun_offset), copy(rerun_reads)},
                                copy(in_place)},
                               copy(order));
           }, nb::keep_alive<1, 2>())
      .def("state", [](Budget& self) {
        const auto& r = self.evictor.rewrite();
        nb::list runs, copies;
        for (int i = 0; i < r.num_runs(); ++i) runs.append(nb::make_tuple(r.runs[i].op, r.runs[i].position, r.runs[i].again, r.runs[i].dead, r.live[i]));
        std::vector<std::vector<int>> uses(r.copies.size());
        for (int i = 0; i < r.num_runs(); ++i) if (!r.runs[i].dead) for (auto c : r.reads_of(i)) uses[c].push_back(i);
        for (std::size_t c = 0; c < r.copies.size(); ++c) copies.append(nb::make_tuple(self.values.tensor[r.copies[c].value], r.copies[c].made, r.copies[c].last_use, r.copies[c].buffer, r.copies[c].consumed, uses[c]));
        return nb::make_tuple(runs, copies, r.peak, r.peak_run);
      })
      .def("run",
           [](Budget& self, Bytes peak, double added) {
             self.evictor.run({peak, added});
             std::vector<Bytes> p;
             std::vector<double> s;
             for (const auto& x : self.evictor.curve()) p.push_back(x.peak), s.push_back(x.added_seconds);
             return nb::make_tuple(to_numpy(std::move(p)), to_numpy(std::move(s)));
           });
}

}  // namespace olla::bindings
