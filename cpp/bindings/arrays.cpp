#include "arrays.hpp"

namespace olla::bindings {

ProgressFn PythonProgress::function() {
  return [this](const Progress& p) {
    nb::gil_scoped_acquire gil;
    if (cancelled_ || error_.is_valid()) return false;
    try {
      cancelled_ = !ask(p);
    } catch (nb::python_error& error) {
      cancelled_ = error.matches(PyExc_KeyboardInterrupt);
      if (!cancelled_) error_ = nb::borrow(error.value());
    }
    return !cancelled_ && !error_.is_valid();
  };
}

bool PythonProgress::ask(const Progress& p) {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  if (callback_.is_none()) return true;
  const nb::object answer = callback_(p.stage, p.seconds, p.value, p.bound);
  const int truth = answer.is_none() ? 1 : PyObject_IsTrue(answer.ptr());  // a callback that only prints returns None
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

void PythonProgress::raise_pending() {
  if (!error_.is_valid()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error_.ptr())), error_.ptr());
  error_.reset();
  throw nb::python_error();
}

}  // namespace olla::bindings
