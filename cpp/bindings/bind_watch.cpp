// Whether Python containers still hold the very objects they held before: what the guards of a compiled step ask at every call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstring>

namespace nb = nanobind;
using namespace nb::literals;

namespace olla::bindings {

namespace {

bool same_items(PyObject* list, PyObject* items) {
  const Py_ssize_t n = PyTuple_Size(items);
  if (PyList_Size(list) != n) return false;
  for (Py_ssize_t i = 0; i < n; ++i)
    if (PyList_GetItem(list, i) != PyTuple_GetItem(items, i)) return false;
  return true;
}

// All of a dict, in its order: items are (key, value, key, value, ...).
bool same_dict(PyObject* dict, PyObject* items) {
  const Py_ssize_t n = PyTuple_Size(items);
  if (PyDict_Size(dict) * 2 != n) return false;
  Py_ssize_t position = 0, i = 0;
  for (PyObject *key, *value; i < n && PyDict_Next(dict, &position, &key, &value); i += 2)
    if (PyTuple_GetItem(items, i) != key || PyTuple_GetItem(items, i + 1) != value) return false;
  return true;
}

// Some keys of a dict: one that maps to `missing` must not be there.
bool same_keys(PyObject* dict, PyObject* expected, PyObject* missing) {
  Py_ssize_t position = 0;
  for (PyObject *key, *value; PyDict_Next(expected, &position, &key, &value);) {
    PyObject* found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (found != (value == missing ? nullptr : value)) return false;
  }
  return true;
}

bool same(PyObject* container, PyObject* items, PyObject* missing) {
  if (!PyDict_Check(container) && !PyList_Check(container))
    throw nb::type_error("first_changed: a container is neither a list nor a dict");
  if (items == Py_None) return PyDict_Size(container) == 0;  // by far the most: hooks that nobody has
  if (PyDict_Check(items)) return same_keys(container, items, missing);
  return PyList_Check(container) ? same_items(container, items) : same_dict(container, items);
}

// CPython before 3.14 counts the changes of every dict, right behind its size (PEP 509); no function of the stable ABI tells them.
std::uint64_t version_of(PyObject* dict) {
  std::uint64_t version = 0;
  std::memcpy(&version, reinterpret_cast<const char*>(dict) + sizeof(PyObject) + sizeof(Py_ssize_t), sizeof version);
  return version;
}

using Versions = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_watch(nb::module_& m) {
  m.def(
      "first_changed",
      [](nb::list containers, nb::list expected, nb::object missing, std::size_t start,
         std::optional<Versions> versions) -> std::ptrdiff_t {
        const std::size_t n = containers.size();
        if (n != expected.size()) throw nb::value_error("first_changed: a container without its items, or the reverse");
        if (versions && versions->size() != n) throw nb::value_error("first_changed: versions are not one for each container");
        for (std::size_t i = start; i < n; ++i) {
          PyObject* container = PyList_GetItem(containers.ptr(), static_cast<Py_ssize_t>(i));
          std::uint64_t* seen = versions && PyDict_Check(container) ? versions->data() + i : nullptr;
          const std::uint64_t version = seen != nullptr ? version_of(container) : 0;
          if (seen != nullptr && *seen == version) continue;
          PyObject* items = PyList_GetItem(expected.ptr(), static_cast<Py_ssize_t>(i));
          if (!same(container, items, missing.ptr())) return static_cast<std::ptrdiff_t>(i);
          if (seen != nullptr) *seen = version;
        }
        return -1;
      },
      "containers"_a, "expected"_a, "missing"_a, "start"_a, "versions"_a.none(),
      "Index of the first container from `start` on that holds other objects than expected; -1: none. A list has a tuple of its items, a "
      "dict a tuple (key, value, key, value, ...) in its order, or a dict of the keys that matter, whose value is `missing` where there is "
      "none; None stands for an empty dict. Objects are compared by identity. versions: uint64[containers], what CPython counted of "
      "each dict when it was last as expected, kept up to date; None where it does not count. Complexity: O(items), O(containers) with versions.");
  m.def(
      "dict_version", [](nb::dict dict) { return version_of(dict.ptr()); }, "dict"_a,
      "What CPython before 3.14 counts up at every change of a dict; see first_changed.");
}

}  // namespace olla::bindings
