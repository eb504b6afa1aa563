#include <nanobind/stl/string.h>

#include "ilp_figures.hpp"
#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/highs.hpp"

namespace olla::bindings {

void bind_address_ilp(nb::module_& m) {
  m.def(
      "address_ilp",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Bytes alignment, Array<Offset> fixed,
         Array<Offset> start, Bytes lower_bound, const std::string& highs_library, double time_limit, std::int32_t seed,
         std::int32_t num_threads, nb::object progress) {
        if (lower.size() != size.size() || upper.size() != size.size()) {
          throw PlanError("lower, upper and size differ in length: " + std::to_string(lower.size()) + ", " +
                              std::to_string(upper.size()) + ", " + std::to_string(size.size()),
                          "lengths", {});
        }
        std::vector<Buffer> buffers;
        for (std::size_t i = 0; i < size.size(); ++i) buffers.push_back({lower.data()[i], upper.data()[i], size.data()[i]});
        PythonProgress watcher(std::move(progress));
        const IlpOptions options{.seed = seed, .num_threads = num_threads};
        Control control("address", time_limit, watcher.function());
        AddressIlpResult r;
        {
          nb::gil_scoped_release release;
          r = address_ilp(buffers, alignment, view(fixed), view(start), lower_bound, Highs(highs_library), options, control);
        }
        watcher.raise_pending();
        return nb::make_tuple(to_numpy(std::move(r.offsets)), r.height, r.load, r.bound, name_of(r.status), control.cancelled(),
                              dict_of(r.figures));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "alignment"_a, "fixed"_a.noconvert(),
      "start"_a.noconvert(), "lower_bound"_a, "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
      "(offsets, height, load, bound, status, cancelled, info): the layout of least height by OLLA's address program; see olla.ilp.address_ilp.");
}

}  // namespace olla::bindings
