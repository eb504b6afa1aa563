// HiGHS run by a Python object, and the types that such an object works with.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "olla/ilp/highs.hpp"

namespace olla::bindings {

// highs: the path of its shared library, or an object like olla.ilp.extension.HighsExtension. With the GIL held.
std::shared_ptr<const HighsEngine> engine_of(const nanobind::object& highs);

void bind_highs(nanobind::module_& m);

}  // namespace olla::bindings
