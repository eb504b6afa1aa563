// Arrays between numpy and the core. Inputs must have the exact dtype and be contiguous: nothing is converted silently.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "olla/base/control.hpp"
#include "olla/base/types.hpp"

namespace olla::bindings {

namespace nb = nanobind;
using namespace nb::literals;

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumpyArray = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

template <class T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <class T>
std::vector<T> copy(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

// The vector's memory becomes the numpy array's: no copy.
template <class T>
NumpyArray<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return NumpyArray<T>(owned->data(), {owned->size()}, owner);
}

// progress(stage, seconds, value, bound) -> bool, or None. Takes the GIL for the call. Ctrl-C and an answer of False ask the search
// to stop with the best it has (cancelled); any other Python error stops it too, and raise_pending throws it once the search has
// returned.
class PythonProgress {
 public:
  explicit PythonProgress(nb::object callback) : callback_(std::move(callback)) {}
  ProgressFn function();
  void raise_pending();  // call with the GIL held
  bool cancelled() const { return cancelled_; }

 private:
  bool ask(const Progress& progress);  // with the GIL held; throws nb::python_error

  nb::object callback_;
  nb::object error_;
  bool cancelled_ = false;
};

}  // namespace olla::bindings
