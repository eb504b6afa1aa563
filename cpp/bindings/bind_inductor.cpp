#include "arrays.hpp"
#include "olla/order/list_schedules.hpp"

namespace olla::bindings {

void bind_inductor(nb::module_& m) {
  const auto bind = [&m](const char* name, std::vector<OpId> (*schedule)(const Graph&), const char* doc) {
    m.def(
        name,
        [schedule](const Graph& graph) {
          std::vector<OpId> order;
          {
            nb::gil_scoped_release release;
            order = schedule(graph);
          }
          return to_numpy(std::move(order));
        },
        "graph"_a, doc);
  };
  bind("least_peak_order", least_peak_order, "Inductor's list schedule: least peak memory first.");
  bind("breadth_first_order", breadth_first_order, "Inductor's list schedule: first in, first out.");
  bind("depth_first_order", depth_first_order, "Inductor's list schedule: what an op needs right before it.");
}

}  // namespace olla::bindings
