#include "arrays.hpp"
#include "olla/check/check.hpp"

namespace olla::bindings {
namespace {

using Named = nb::typed<nb::dict, nb::str, nb::int_>;

Bytes figure(const Named& figures, const char* name) {
  if (!figures.contains(name)) throw PlanError(std::string("the figure ") + name + " is missing", "figures", {});
  Bytes value = 0;
  if (!nb::try_cast(figures[name], value)) throw PlanError(std::string(name) + " must be an integer below 2^63", "figures", {});
  return value;
}

}  // namespace

void bind_check(nb::module_& m) {
  m.def(
      "check",
      [](const Graph& graph, Array<OpId> order, Array<Offset> offsets, Array<Offset> workspace_offsets, Bytes alignment,
         const Named& figures, Array<OpId> before, Array<OpId> after, const Graph* given) {
        const PlanView plan{view(order),
                            view(offsets),
                            view(workspace_offsets),
                            alignment,
                            view(before),
                            view(after),
                            {figure(figures, "peak_bytes"), figure(figures, "lower_bound_bytes"),
                             figure(figures, "program_peak_bytes"), figure(figures, "resident_bytes"),
                             figure(figures, "donated_bytes"), figure(figures, "arena_bytes"), figure(figures, "load_bytes")},
                            given};
        nb::gil_scoped_release release;
        check(graph, plan);
      },
      "graph"_a, "order"_a.noconvert(), "offsets"_a.noconvert(), "workspace_offsets"_a.noconvert(), "alignment"_a, "figures"_a,
      "before"_a.noconvert(), "after"_a.noconvert(), "given"_a.none(),
      "Raise PlanError with the broken rule unless the plan is valid: order, offsets (-1: not in the arena), workspace offsets, alignment, "
      "the figures it reports, and the extra precedences before[i] -> after[i]. Its program_peak_bytes are of the graph `given`; None: they "
      "are not checked.");
}

}  // namespace olla::bindings
