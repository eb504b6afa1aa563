// Checks that Python containers still hold the very same objects as before: the guards of a compiled step do so at every call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstring>

namespace nb = nanobind;
using namespace nb::literals;

namespace olla::bindings {

namespace {

using Ids = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Versions = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ends = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t id_of(PyObject* object) { return reinterpret_cast<std::uintptr_t>(object); }

// The size that a function of Python returned, which is negative where the container is of another type.
Py_ssize_t size_or_raise(Py_ssize_t size) {
  if (size < 0) throw nb::python_error();
  return size;
}

bool same_list(PyObject* list, const std::uint64_t* ids, Py_ssize_t count) {
  if (size_or_raise(PyList_Size(list)) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (id_of(PyList_GetItem(list, i)) != ids[i]) return false;
  return true;
}

// All of a dict, in its order: ids are those of key, value, key, value, ...
bool same_dict(PyObject* dict, const std::uint64_t* ids, Py_ssize_t count) {
  if (size_or_raise(PyDict_Size(dict)) * 2 != count) return false;
  if (count == 0) return true;  // by far the most common: dicts of hooks that nobody set
  Py_ssize_t position = 0, i = 0;
  for (PyObject *key, *value; i < count && PyDict_Next(dict, &position, &key, &value); i += 2)
    if (ids[i] != id_of(key) || ids[i + 1] != id_of(value)) return false;
  return true;
}

// CPython before 3.13 counts every change of a dict, right behind its size (PEP 509); no function of the stable ABI returns it.
std::uint64_t version_of(PyObject* dict) {
  std::uint64_t version = 0;
  std::memcpy(&version, reinterpret_cast<const char*>(dict) + sizeof(PyObject) + sizeof(Py_ssize_t), sizeof version);
  return version;
}

// Some keys of a dict: one that maps to `missing` must not be there.
bool same_keys(PyObject* dict, PyObject* expected, PyObject* missing) {
  size_or_raise(PyDict_Size(dict));
  Py_ssize_t position = 0;
  for (PyObject *key, *value; PyDict_Next(expected, &position, &key, &value);) {
    PyObject* found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (found != (value == missing ? nullptr : value)) return false;
  }
  return true;
}

bool has_dict(PyObject* object, PyObject* expected) {
  PyObject* found = PyObject_GenericGetDict(object, nullptr);
  if (found == nullptr) throw nb::python_error();
  Py_DECREF(found);  // the object keeps it
  return found == expected;
}

}  // namespace

void bind_watch(nb::module_& m) {
  m.def(
      "first_changed",
      [](nb::list containers, std::size_t num_dicts, Ends ends, Ids ids, std::size_t start,
         std::optional<Versions> versions) -> std::ptrdiff_t {
        const std::size_t n = containers.size();
        if (n != ends.size()) throw nb::value_error("first_changed: a container without its items, or the reverse");
        if (versions && versions->size() < num_dicts) throw nb::value_error("first_changed: not one version for each dict");
        if (n > 0 && ends(n - 1) > ids.size()) throw nb::value_error("first_changed: more items than ids");
        std::uint64_t* seen = versions ? versions->data() : nullptr;
        for (std::size_t i = start; i < n; ++i) {
          PyObject* container = PyList_GetItem(containers.ptr(), static_cast<Py_ssize_t>(i));
          const bool is_dict = i < num_dicts;
          const std::uint64_t version = is_dict && seen != nullptr ? version_of(container) : 0;
          if (version != 0 && version == seen[i]) continue;
          const std::size_t begin = i == 0 ? 0 : ends.data()[i - 1];
          const auto count = static_cast<Py_ssize_t>(ends.data()[i] - begin);
          const std::uint64_t* expected = ids.data() + begin;
          if (!(is_dict ? same_dict(container, expected, count) : same_list(container, expected, count)))
            return static_cast<std::ptrdiff_t>(i);
          if (version != 0) seen[i] = version;
        }
        return -1;
      },
      "containers"_a, "num_dicts"_a, "ends"_a, "ids"_a, "start"_a, "versions"_a.none(),
      "Index of the first container from `start` on that holds other objects than expected; -1: none. The first num_dicts are dicts, "
      "the others lists. ends: uint32[containers], where the ids of each end; ids: uint64[items], id() of the items of a list, of key, "
      "value, key, value, ... of a dict in its order. The caller keeps these objects. versions: uint64[num_dicts], what CPython "
      "before 3.13 counted of each dict when it was last as expected, kept up to date; None elsewhere. Complexity: O(items), "
      "O(containers) with versions.");
  m.def(
      "first_other",
      [](nb::list dicts, nb::list expected, nb::object missing, std::size_t start) -> std::ptrdiff_t {
        const std::size_t n = dicts.size();
        if (n != expected.size()) throw nb::value_error("first_other: a dict without its keys, or the reverse");
        for (std::size_t i = start; i < n; ++i) {
          const auto at = static_cast<Py_ssize_t>(i);
          if (!same_keys(PyList_GetItem(dicts.ptr(), at), PyList_GetItem(expected.ptr(), at), missing.ptr()))
            return static_cast<std::ptrdiff_t>(i);
        }
        return -1;
      },
      "dicts"_a, "expected"_a, "missing"_a, "start"_a,
      "Index of the first dict from `start` on that holds, by the keys of its expected dict, other objects than that one; -1: none. A key "
      "that maps to `missing` must not be there. Complexity: O(keys).");
  m.def(
      "same_objects",
      [](nb::list objects, Ids ids) {
        const auto n = static_cast<Py_ssize_t>(objects.size());
        if (n != static_cast<Py_ssize_t>(ids.size())) return false;
        for (Py_ssize_t i = 0; i < n; ++i)
          if (ids.data()[i] != 0 && id_of(PyList_GetItem(objects.ptr(), i)) != ids.data()[i]) return false;
        return true;
      },
      "objects"_a, "ids"_a,
      "Whether a list holds the very objects it held before. ids: uint64[items], id() of each, 0 for any object; the caller keeps these "
      "objects. Complexity: O(items).");
  m.def(
      "same_kinds",
      [](nb::list objects, nb::tuple types, nb::tuple dicts) {
        const auto n = static_cast<Py_ssize_t>(objects.size());
        if (n != static_cast<Py_ssize_t>(types.size()) || n != static_cast<Py_ssize_t>(dicts.size()))
          throw nb::value_error("same_kinds: not one type and one dict for each object");
        for (Py_ssize_t i = 0; i < n; ++i) {
          PyObject *object = PyList_GetItem(objects.ptr(), i), *dict = PyTuple_GetItem(dicts.ptr(), i);
          if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != PyTuple_GetItem(types.ptr(), i)) return false;
          if (dict != Py_None && !has_dict(object, dict)) return false;
        }
        return true;
      },
      "objects"_a, "types"_a, "dicts"_a,
      "Whether objects are of the very types they were, and keep their attributes in the very dicts; None: in none. Complexity: O(objects).");
}

}  // namespace olla::bindings
