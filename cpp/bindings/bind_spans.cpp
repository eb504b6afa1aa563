#include <nanobind/stl/tuple.h>

#include "arrays.hpp"
#include "olla/graph/spans.hpp"

namespace olla::bindings {

void bind_spans(nb::module_& m) {
  m.def(
      "spans",
      [](const Graph& graph) {
        Spans s;
        {
          nb::gil_scoped_release release;
          s = spans(graph);
        }
        return std::make_tuple(to_numpy(std::move(s.earliest)), to_numpy(std::move(s.latest)));
      },
      "graph"_a, "(earliest, latest) step of every op when one op runs per step.");
}

}  // namespace olla::bindings
