#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "olla/base/error.hpp"
#include "olla/layout/layout.hpp"

namespace olla::bindings {

void bind_layout(nb::module_& m) {
  m.def(
      "layout",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Bytes alignment, double time_limit,
         std::uint64_t seed, nb::object progress, Bytes capacity, int num_threads, std::optional<Array<Offset>> fixed,
         std::optional<Array<Offset>> preferred, std::int64_t max_nodes, std::int64_t max_placements) {
        const auto fits = [&](const auto& column) { return !column || column->size() == lower.size(); };
        if (lower.size() != upper.size() || lower.size() != size.size() || !fits(fixed) || !fits(preferred)) {
          throw PlanError("lower, upper, size, fixed and preferred must be equally long", "lengths", {});
        }
        std::vector<Buffer> buffers;
        buffers.reserve(lower.size());
        for (std::size_t i = 0; i < lower.size(); ++i) {
          buffers.push_back({view(lower)[i], view(upper)[i], view(size)[i], fixed ? view(*fixed)[i] : kFree,
                             preferred ? view(*preferred)[i] : kFree});
        }
        PythonProgress python(std::move(progress));
        Control control("layout", time_limit, python.function());
        LayoutResult result;
        {
          nb::gil_scoped_release release;
          LayoutOptions options{.alignment = alignment, .seed = seed, .capacity = capacity, .num_threads = num_threads};
          if (max_nodes >= 0) options.max_nodes = max_nodes;
          if (max_placements >= 0) options.max_placements = max_placements;
          result = layout(buffers, options, control);
        }
        python.raise_pending();
        return nb::make_tuple(to_numpy(std::move(result.offsets)), result.height, result.load, result.bound, control.cancelled());
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "alignment"_a, "time_limit"_a, "seed"_a,
      "progress"_a.none(), "capacity"_a = 0, "num_threads"_a = 1, "fixed"_a.noconvert() = nb::none(),
      "preferred"_a.noconvert() = nb::none(), "max_nodes"_a = -1, "max_placements"_a = -1,
      "(offsets, height, load, bound, cancelled): offset of buffer i, alive during [lower[i], upper[i]), after rounding sizes up to "
      "the alignment; no height is below bound. Any height up to a capacity above 0 is enough. Buffer i "
      "must lie at fixed[i], and lies at preferred[i] where that costs no height; -1: anywhere. The exact "
      "search places max_nodes items at most, the other searches max_placements or what takes as long; -1: as the core has it.");
}

}  // namespace olla::bindings
