#include "arrays.hpp"

#include <exception>

namespace olla::bindings {
namespace {

// Whether the search is to go on. With the GIL held; throws nb::python_error.
bool ask(const nb::object& callback, const Progress& p) {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  if (callback.is_none()) return true;
  const nb::object answer = callback(p.stage, p.seconds, p.value, p.bound);
  const int truth = answer.is_none() ? 1 : PyObject_IsTrue(answer.ptr());  // a callback that only prints returns None
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

}  // namespace

bool limited(const char* stage, const Limits& limits, const std::function<void(Control&)>& work) {
  bool cancelled = false;
  std::exception_ptr error;
  const auto progress = [&](const Progress& p) {
    nb::gil_scoped_acquire gil;
    if (cancelled || error) return false;
    try {
      cancelled = !ask(limits.progress, p);
    } catch (nb::python_error& raised) {
      cancelled = raised.matches(PyExc_KeyboardInterrupt);
      if (!cancelled) error = std::current_exception();
    }
    return !cancelled && !error;
  };
  Control control(stage, limits.time_limit, progress, limits.max_work.value_or(kAnyWork));
  {
    nb::gil_scoped_release release;
    work(control);
  }
  if (error) std::rethrow_exception(error);
  return control.cancelled();
}

}  // namespace olla::bindings
