#include "arrays.hpp"

namespace olla::bindings {

ProgressFn PythonProgress::function() {
  return [this](const Progress& p) {
    nb::gil_scoped_acquire gil;
    if (error_.is_valid()) return false;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (callback_.is_none()) return true;
      return nb::cast<bool>(callback_(p.stage, p.seconds, p.value, p.bound));
    } catch (nb::python_error& error) {
      error_ = nb::borrow(error.value());
      return false;
    }
  };
}

void PythonProgress::raise_pending() {
  if (!error_.is_valid()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.ptr())), error_.ptr());
  error_.reset();
  throw nb::python_error();
}

}  // namespace olla::bindings
