#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "olla/base/error.hpp"
#include "olla/layout/greedy/best_fit.hpp"
#include "olla/layout/layout.hpp"

namespace olla::bindings {
namespace {

using Column = Array<std::int64_t>;
using OptionalColumn = std::optional<Array<Offset>>;

using Placed = Found<LayoutResult>;
using Fitted = Found<FitResult>;

std::vector<Buffer> buffers(const Column& lower, const Column& upper, const Column& size, const OptionalColumn& fixed = {},
                            const OptionalColumn& preferred = {}) {
  const auto fits = [&](const auto& column) { return !column || column->size() == lower.size(); };
  if (lower.size() != upper.size() || lower.size() != size.size() || !fits(fixed) || !fits(preferred)) {
    throw PlanError("lower, upper, size, fixed and preferred must be equally long", "lengths", {});
  }
  std::vector<Buffer> result;
  result.reserve(lower.size());
  for (std::size_t i = 0; i < lower.size(); ++i) {
    result.push_back(
        {view(lower)[i], view(upper)[i], view(size)[i], fixed ? view(*fixed)[i] : kFree, preferred ? view(*preferred)[i] : kFree});
  }
  return result;
}

Fitted fit(const std::vector<Buffer>& list, const std::vector<std::int32_t>& order, Hole rule, Bytes alignment, double time_limit,
           nb::object progress) {
  return search("layout", {time_limit, {}, std::move(progress)},
                [&](Control& control) { return fit_in_order(list, order, rule, alignment, control); });
}

// Fields in the order of the struct, whose defaults hold.
void bind_options(nb::module_& m) {
  const LayoutOptions core;
  nb::class_<LayoutOptions>(m, "LayoutOptions",
                            "How to look for a layout: alignment in bytes, a capacity in bytes that is enough (0: as low as can be "
                            "found), the effort, and a switch for every search.")
      .def(nb::init<Bytes, std::uint64_t, Bytes, int, std::int64_t, std::int64_t, bool, bool, bool, bool, bool, bool, bool, bool>(),
           nb::kw_only(), "alignment"_a = core.alignment, "seed"_a = core.seed, "capacity"_a = core.capacity,
           "num_threads"_a = core.num_threads, "max_placements"_a = core.max_placements, "max_nodes"_a = core.max_nodes,
           "use_enumeration"_a = core.use_enumeration, "use_keys"_a = core.use_keys, "use_births"_a = core.use_births,
           "use_squeaky_wheel"_a = core.use_squeaky_wheel, "use_foresight"_a = core.use_foresight, "use_exact"_a = core.use_exact,
           "use_neighbourhood"_a = core.use_neighbourhood, "use_beam"_a = core.use_beam);
}

void bind_results(nb::module_& m) {
  nb::class_<Placed>(m, "LayoutResult", "Offsets for buffers, and how good they are.")
      .def_prop_ro("offsets", array<Placed>(&Placed::offsets), "int64[m], bytes: where buffer i begins.")
      .def_ro("height_bytes", &Placed::height, "The largest end of a buffer, sizes rounded up to the alignment.")
      .def_ro("load_bytes", &Placed::load, "Most bytes alive at once, of the same rounded sizes.")
      .def_ro("bound_bytes", &Placed::bound, "No layout is lower; at least the load.")
      .def_ro("cancelled", &Placed::cancelled, "Whether the progress callback, or Ctrl-C, ended the search.");
  nb::class_<Fitted>(m, "FitResult", "Offsets for buffers that were placed one after the other.")
      .def_prop_ro("offsets", array<Fitted>(&Fitted::offsets), "int64[m], bytes: where buffer i begins.")
      .def_ro("height_bytes", &Fitted::height, "The largest end of a buffer, sizes rounded up to the alignment.")
      .def_ro("cancelled", &Fitted::cancelled, "Whether the progress callback, or Ctrl-C, ended the search.");
}

}  // namespace

void bind_layout(nb::module_& m) {
  bind_options(m);
  bind_results(m);
  m.def(
      "layout",
      [](const Column& lower, const Column& upper, const Column& size, const OptionalColumn& fixed, const OptionalColumn& preferred,
         LayoutOptions options, double time_limit, nb::object progress) {
        const std::vector<Buffer> list = buffers(lower, upper, size, fixed, preferred);
        return search("layout", {time_limit, {}, std::move(progress)},
                      [&](Control& control) { return layout(list, options, control); });
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "fixed"_a.noconvert().none(),
      "preferred"_a.noconvert().none(), "options"_a, "time_limit"_a, "progress"_a.none(),
      "Offsets for buffers: buffer i is alive during [lower[i], upper[i]), must lie at fixed[i], and lies at preferred[i] where "
      "that costs no height; -1: anywhere. Use olla.layout.place instead.");
  m.def(
      "fit_in_order",
      [](const Column& lower, const Column& upper, const Column& size, const Array<std::int32_t>& order, bool lowest,
         Bytes alignment, double time_limit, nb::object progress) {
        const Hole rule = lowest ? Hole::kLowest : Hole::kBest;
        return fit(buffers(lower, upper, size), copy(order), rule, alignment, time_limit, std::move(progress));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "order"_a.noconvert(), "lowest"_a, "alignment"_a,
      "time_limit"_a, "progress"_a.none(),
      "Buffers placed one after the other, each into the smallest hole that is large enough, or into the lowest.");
  m.def(
      "smartpool",
      [](const Column& lower, const Column& upper, const Column& size, const Array<std::uint8_t>& outlives, Bytes alignment,
         double time_limit, nb::object progress) {
        const std::vector<Buffer> list = buffers(lower, upper, size);
        const std::vector<std::int32_t> order = smartpool_order(list, view(outlives));
        return fit(list, order, Hole::kBest, alignment, time_limit, std::move(progress));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "outlives"_a.noconvert(), "alignment"_a, "time_limit"_a,
      "progress"_a.none(), "Best fit of what outlives the iteration, then by falling size.");
}

}  // namespace olla::bindings
