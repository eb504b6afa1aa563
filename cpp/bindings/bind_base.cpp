#include <nanobind/stl/optional.h>

#include "arrays.hpp"

namespace olla::bindings {

void bind_base(nb::module_& m) {
  nb::class_<Limits>(m, "Limits",
                     "What ends a search before it is done: seconds, units of work (None: any number), and a callback that may "
                     "answer False.")
      .def(nb::init<double, std::optional<std::int64_t>, nb::object>(), nb::kw_only(), "time_limit"_a, "max_work"_a.none(),
           "progress"_a.none());
}

}  // namespace olla::bindings
