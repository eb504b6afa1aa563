// Checks that tensors still have their recorded addresses, before each replay of a CUDA graph, which reads and writes there. A
// separate module: torch's headers for Python objects take ten seconds to compile, and nothing else needs them.
#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <exception>

namespace {

PyTypeObject* tensor_type = nullptr;

// A borrowed buffer of native int64, released when the call ends.
struct Numbers {
  Py_buffer buffer{};

  ~Numbers() { PyBuffer_Release(&buffer); }
  Py_ssize_t size() const { return buffer.len / static_cast<Py_ssize_t>(sizeof(std::int64_t)); }
  std::int64_t operator[](Py_ssize_t i) const { return static_cast<const std::int64_t*>(buffer.buf)[i]; }
};

// A Python tensor stays the same object when `x.data = y` or a swap of two tensors gives it other memory, so its TensorImpl is
// read anew. A tensor without memory (data() throws) matches no address.
bool is_at(PyObject* value, std::int64_t address) {
  try {
    return reinterpret_cast<std::intptr_t>(THPVariable_Unpack(value).unsafeGetTensorImpl()->data()) == address;
  } catch (const std::exception&) {
    return false;
  }
}

PyObject* are_at(PyObject*, PyObject* args) {
  PyObject* values = nullptr;
  Numbers positions, addresses;
  if (!PyArg_ParseTuple(args, "O!y*y*", &PyList_Type, &values, &positions.buffer, &addresses.buffer)) return nullptr;
  if (addresses.size() != positions.size()) return PyErr_SetString(PyExc_ValueError, "an address for each position"), nullptr;
  const PyTypeObject* known = tensor_type;  // most values have one type: a pointer comparison suffices
  for (Py_ssize_t i = 0; i < positions.size(); ++i) {
    if (positions[i] < 0 || positions[i] >= PyList_GET_SIZE(values))
      return PyErr_SetString(PyExc_IndexError, "no such value"), nullptr;
    PyObject* const value = PyList_GET_ITEM(values, positions[i]);
    if (Py_TYPE(value) != known && !PyObject_TypeCheck(value, tensor_type)) Py_RETURN_FALSE;
    known = Py_TYPE(value);
    if (!is_at(value, addresses[i])) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"are_at", are_at, METH_VARARGS, "are_at(values, positions, addresses) -> whether values[positions[i]] is at addresses[i]"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_olla_addresses", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__olla_addresses() {
  PyObject* const torch = PyImport_ImportModule("torch");
  if (torch == nullptr) return nullptr;
  tensor_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(torch, "Tensor"));  // for as long as the process lives
  Py_DECREF(torch);
  return tensor_type == nullptr ? nullptr : PyModule_Create(&definition);
}
