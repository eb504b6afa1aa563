#include <nanobind/stl/string.h>

#include "ilp_figures.hpp"
#include "olla/ilp/order_ilp.hpp"

namespace olla::bindings {
namespace {

nb::dict info_of(const OrderIlpResult& result) {
  nb::dict info;
  info["num_columns"] = result.num_columns;
  info["num_rows"] = result.num_rows;
  info["num_nonzeros"] = result.num_nonzeros;
  info["num_nodes"] = result.num_nodes;
  info["seconds_build"] = result.seconds_build;
  info["seconds_solve"] = result.seconds_solve;
  info["message"] = result.message;
  return info;
}

}  // namespace

void bind_ilp(nb::module_& m) {
  bind_address_ilp(m);
  bind_joint_ilp(m);
  m.def(
      "order_ilp",
      [](const Graph& graph, Array<OpId> start, Bytes lower_bound, const std::string& highs_library, double time_limit,
         std::int32_t seed, std::int32_t num_threads, nb::object progress, bool reduce) {
        PythonProgress watcher(std::move(progress));
        OrderIlpOptions options;
        options.seed = seed;
        options.num_threads = num_threads;
        options.reduce = reduce;
        OrderIlpResult result;
        bool cancelled = false;
        {
          nb::gil_scoped_release release;
          Control control("ilp", time_limit, watcher.function());
          result = order_ilp(graph, view(start), lower_bound, Highs(highs_library), options, control);
          cancelled = control.cancelled();
        }
        watcher.raise_pending();
        nb::dict info = info_of(result);
        info["cancelled"] = cancelled;
        const char* status = result.status == Status::kOptimal ? "optimal" : "feasible";
        return nb::make_tuple(to_numpy(std::move(result.order)), result.peak, result.lower_bound, status, info);
      },
      "graph"_a, "start"_a.noconvert(), "lower_bound"_a, "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a,
      "progress"_a.none(), "reduce"_a = true,
      "(order, peak, lower_bound, status, info): the order of least peak by OLLA's lifetime program; see olla.ilp.order_ilp. reduce=False "
      "leaves every op at every step of its span.");
}

}  // namespace olla::bindings
