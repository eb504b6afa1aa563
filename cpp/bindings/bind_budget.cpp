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
