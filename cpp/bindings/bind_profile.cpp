#include <nanobind/stl/tuple.h>

#include "arrays.hpp"
#include "olla/graph/profile.hpp"

namespace olla::bindings {

void bind_profile(nb::module_& m) {
  m.def(
      "profile",
      [](const Graph& graph, Array<OpId> order) {
        const std::vector<OpId> checked = copy(order);  // of our own: the caller's may change while the GIL is released
        Profile p;
        {
          nb::gil_scoped_release release;
          if (!graph.is_order(checked))
            throw PlanError("the order breaks a dependency or is no permutation of the ops", "order", {});
          p = profile(graph, checked);
        }
        return std::make_tuple(to_numpy(std::move(p.lifetimes.first)), to_numpy(std::move(p.lifetimes.last)),
                               to_numpy(std::move(p.live)), p.peak, p.peak_step);
      },
      "graph"_a, "order"_a.noconvert(),
      "(first, last, live, peak, peak_step): half-open lifetime [first[t], last[t]) of tensor t, live bytes during step s, their maximum "
      "and where it is reached first.");
}

}  // namespace olla::bindings
