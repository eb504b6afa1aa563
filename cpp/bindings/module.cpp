#include <nanobind/nanobind.h>

#include "olla/base/error.hpp"

namespace nb = nanobind;

namespace olla::bindings {
using Bind = void(nb::module_&);
Bind bind_base, bind_check, bind_graph, bind_ilp, bind_layout, bind_order, bind_recompute, bind_swap, bind_watch;
}  // namespace olla::bindings

namespace {

// The exception classes live in olla.errors; they are looked up when one is thrown.
void raise_python(const olla::Error& error, const char* name) {
  nb::object type = nb::module_::import_("olla.errors").attr(name);
  nb::list ids;
  for (const std::int64_t id : error.ids()) ids.append(id);
  nb::object value = type(error.what(), nb::arg("rule") = error.rule().c_str(), nb::arg("ids") = nb::tuple(ids));
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const olla::GraphError& error) {
    raise_python(error, "GraphError");
  } catch (const olla::PlanError& error) {
    raise_python(error, "PlanError");
  } catch (const olla::SolverError& error) {
    raise_python(error, "SolverError");
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ core of olla: arrays in, arrays out. Use the functions of the olla package instead.";
  nb::set_leak_warnings(false);  // a graph kept by a global or a traceback when Python exits is no error
  nb::register_exception_translator(translate);
  using namespace olla::bindings;
  for (Bind* bind : {bind_base, bind_check, bind_graph, bind_ilp, bind_layout, bind_order, bind_recompute, bind_swap, bind_watch})
    bind(m);
}
