#include <nanobind/stl/string.h>

#include "ilp_figures.hpp"
#include "olla/ilp/joint_ilp.hpp"
#include "olla/ilp/joint_program.hpp"

namespace olla::bindings {

void bind_joint_ilp(nb::module_& m) {
  m.def(
      "arena_graph",
      [](const Graph& graph, Bytes alignment) {
        nb::gil_scoped_release release;
        return arena_graph(graph, alignment);
      },
      "graph"_a, "alignment"_a,
      "The graph whose peaks are the loads of the arena: tensors no op writes have no bytes, all other sizes are rounded up.");
  m.def(
      "joint_ilp",
      [](const Graph& arena, Array<OpId> order, Array<Offset> offsets, Array<Offset> workspace_offsets, Bytes lower_bound,
         const std::string& highs_library, double time_limit, std::int32_t seed, std::int32_t num_threads, nb::object progress) {
        PythonProgress watcher(std::move(progress));
        const IlpOptions options{.seed = seed, .num_threads = num_threads};
        Control control("joint", time_limit, watcher.function());
        JointIlpResult r;
        {
          nb::gil_scoped_release release;
          r = joint_ilp(arena, view(order), view(offsets), view(workspace_offsets), lower_bound, Highs(highs_library), options,
                        control);
        }
        watcher.raise_pending();
        return nb::make_tuple(to_numpy(std::move(r.order)), to_numpy(std::move(r.offsets)),
                              to_numpy(std::move(r.workspace_offsets)), r.arena, r.lower_bound, name_of(r.status),
                              control.cancelled(), dict_of(r.figures));
      },
      "arena"_a, "order"_a.noconvert(), "offsets"_a.noconvert(), "workspace_offsets"_a.noconvert(), "lower_bound"_a,
      "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
      "(order, offsets, workspace_offsets, arena, lower_bound, status, cancelled, info): the order and layout of the smallest arena by OLLA's "
      "joint program; see olla.ilp.joint_ilp.");
}

}  // namespace olla::bindings
