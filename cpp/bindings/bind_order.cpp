#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "olla/order/list_schedules.hpp"
#include "olla/order/order.hpp"

namespace olla::bindings {

void bind_order(nb::module_& m) {
  using Order = Found<OrderResult>;
  nb::class_<Order>(m, "OrderResult", "The best order found, and what is proved of all others.")
      .def_prop_ro("order", array<Order>(&Order::order), "int32[ops]: the op that runs at step i.")
      .def_ro("peak_bytes", &Order::peak)
      .def_ro("lower_bound_bytes", &Order::bound, "No order has a lower peak.")
      .def_ro("cancelled", &Order::cancelled, "Whether the progress callback, or Ctrl-C, ended the search.");
  m.def(
      "order",
      [](const Graph& graph, std::vector<Array<OpId>> starts, std::uint64_t seed, const Limits& limits) {
        std::vector<std::vector<OpId>> orders;
        for (const auto& start : starts) orders.push_back(copy(start));
        return search("order", limits, [&](Control& control) { return order(graph, orders, {.seed = seed}, control); });
      },
      "graph"_a, "starts"_a, "seed"_a, "limits"_a,
      "The best order found from the given ones, and its proof. Work: ops of the windows cut, and nodes of the networks at every phase of their flows.");
  m.def(
      "lower_bound",
      [](const Graph& graph, Array<OpId> order, std::int64_t max_cuts, double time_limit, nb::object progress) {
        Bytes bound = 0;
        const bool cancelled = limited("bound", {time_limit, {}, std::move(progress)},
                                       [&](Control& control) { bound = lower_bound(graph, copy(order), max_cuts, control); });
        return std::pair(bound, cancelled);
      },
      "graph"_a, "order"_a.noconvert(), "max_cuts"_a, "time_limit"_a, "progress"_a.none(),
      "(bound, cancelled): no order needs less than bound, from the cuts of at most max_cuts ops of one order.");
  const auto bind = [&m](const char* name, std::vector<OpId> (*schedule)(const Graph&), const char* doc) {
    m.def(name, [schedule](const Graph& graph) { return to_numpy(without_gil([&] { return schedule(graph); })); }, "graph"_a, doc);
  };
  bind("least_peak_order", least_peak_order, "Inductor's list schedule: least peak memory first.");
  bind("breadth_first_order", breadth_first_order, "Inductor's list schedule: first in, first out.");
  bind("depth_first_order", depth_first_order, "Inductor's list schedule: what an op needs right before it.");
}

}  // namespace olla::bindings
