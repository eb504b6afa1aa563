// The extension module of a device: windows, recordings and tables for Python. Plain C API, because a window opens and closes
// around every op. Arrays travel as buffers of native int64.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>

#include <cstring>
#include <string>
#include <vector>

#include "allocator.hpp"

namespace {

using namespace olla::replay;

PyObject* replay_error = nullptr;
PyObject* out_of_memory = nullptr;

// Runs `body` and turns what it throws into a ReplayError, or into the error that says there is no memory.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const OutOfMemory& error) {
    PyErr_SetString(out_of_memory, error.what());
    return nullptr;
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch appends its stack: the first line says it
    PyErr_SetString(replay_error, what.substr(0, what.find('\n')).c_str());
    return nullptr;
  }
}

PyObject* begin(PyObject*, PyObject* op) {
  const long value = PyLong_AsLong(op);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    memory().begin(value < 0 || value > INT32_MAX ? kNoOp : static_cast<OpId>(value));
    Py_RETURN_NONE;
  });
}

PyObject* live(PyObject*, PyObject* op) {
  const long value = PyLong_AsLong(op);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(memory().live(static_cast<OpId>(value)));
}

PyObject* end(PyObject*, PyObject*) {
  memory().end();
  Py_RETURN_NONE;
}

PyObject* bytes_of(const std::vector<std::int64_t>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t));
}

PyObject* rows_of(const std::vector<Recording::Allocation>& allocations) {
  std::vector<std::int64_t> rows;
  rows.reserve(6 * allocations.size());
  for (const auto& a : allocations)
    rows.insert(rows.end(), {a.op, a.index, a.bytes, a.freed_in, a.freed_at, reinterpret_cast<std::intptr_t>(a.block)});
  return bytes_of(rows);
}

PyObject* stop_recording(PyObject*, PyObject*) {
  return guarded([] { return rows_of(memory().stop_recording()); });
}

std::vector<std::int64_t> copied(const Py_buffer& buffer) {
  std::vector<std::int64_t> values(buffer.len / sizeof(std::int64_t));
  if (!values.empty()) std::memcpy(values.data(), buffer.buf, values.size() * sizeof(std::int64_t));
  return values;
}

PyObject* activate(PyObject*, PyObject* args) {
  long long arena_bytes = 0, alignment = 0;
  int recording = 0;
  Py_buffer first, bytes, offset;
  if (!PyArg_ParseTuple(args, "LLy*y*y*p", &arena_bytes, &alignment, &first, &bytes, &offset, &recording)) return nullptr;
  PyObject* const result = guarded([&]() -> PyObject* {
    install();
    memory().activate({arena_bytes, alignment, copied(first), copied(bytes), copied(offset), {}}, recording != 0);
    Py_RETURN_NONE;
  });
  for (Py_buffer* buffer : {&first, &bytes, &offset}) PyBuffer_Release(buffer);
  return result;
}

PyObject* tuple_of(const Counters& counters) {
  PyObject* const misses = PyList_New(0);
  if (misses == nullptr) return nullptr;
  for (const Miss& m : counters.misses) {
    PyObject* const miss = Py_BuildValue("(iiLs)", m.op, m.index, static_cast<long long>(m.bytes), m.reason);
    const bool added = miss != nullptr && PyList_Append(misses, miss) == 0;
    Py_XDECREF(miss);
    if (!added) return Py_DECREF(misses), nullptr;
  }
  const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
  return Py_BuildValue("(LLLLLNLL)", number(counters.num_hits), number(counters.num_misses), number(counters.missed_bytes),
                       number(counters.peak_bytes), number(counters.high_water_bytes), misses, number(counters.requested_bytes),
                       number(counters.hit_bytes));
}

PyObject* deactivate(PyObject*, PyObject* args) {
  int keep = 0;
  if (!PyArg_ParseTuple(args, "p", &keep)) return nullptr;
  return guarded([&] { return tuple_of(memory().deactivate(keep != 0)); });
}

PyObject* abandon(PyObject*, PyObject*) {
  memory().abandon();
  Py_RETURN_NONE;
}

PyObject* release(PyObject*, PyObject*) {
  memory().release();
  Py_RETURN_NONE;
}

PyObject* open_loop(PyObject*, PyObject* shared) {
  const int value = PyObject_IsTrue(shared);
  if (value < 0) return nullptr;
  return guarded([&]() -> PyObject* {
    install();
    memory().open_loop(value != 0);
    Py_RETURN_NONE;
  });
}

PyObject* plan_loop(PyObject*, PyObject* args) {
  long long arena_bytes = 0, alignment = 0;
  Py_buffer first, bytes, offset, held, least;
  if (!PyArg_ParseTuple(args, "LLy*y*y*y*y*", &arena_bytes, &alignment, &first, &bytes, &offset, &held, &least)) return nullptr;
  PyObject* const result = guarded([&]() -> PyObject* {
    memory().plan_loop({arena_bytes, alignment, copied(first), copied(bytes), copied(offset), copied(held), copied(least)});
    Py_RETURN_NONE;
  });
  for (Py_buffer* buffer : {&first, &bytes, &offset, &held, &least}) PyBuffer_Release(buffer);
  return result;
}

PyObject* loop_counters(PyObject*, PyObject*) {
  return guarded([] { return tuple_of(memory().loop_counters()); });
}

PyObject* loop_row(PyObject*, PyObject*) {
  return guarded([] {
    const auto [row, held] = memory().loop_row();
    std::vector<std::int64_t> blocks;
    for (const auto& block : held) blocks.insert(blocks.end(), {block.offset, block.end, block.owner});
    return Py_BuildValue("(iN)", row, bytes_of(blocks));
  });
}

PyObject* iteration(PyObject*, PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&] {
    const auto allocations = memory().iteration(static_cast<OpId>(value));
    std::vector<std::int64_t> rows;
    for (const auto& a : allocations) rows.insert(rows.end(), {a.made_at, a.bytes, a.freed_in, a.freed_at});
    return bytes_of(rows);
  });
}

PyObject* forget(PyObject*, PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    memory().forget(static_cast<OpId>(value));
    Py_RETURN_NONE;
  });
}

PyObject* close_loop(PyObject*, PyObject*) {
  memory().close_loop();
  Py_RETURN_NONE;
}

PyObject* arena(PyObject*, PyObject*) {
  const auto [base, bytes] = memory().arena();
  return Py_BuildValue("(NL)", PyLong_FromVoidPtr(base), static_cast<long long>(bytes));
}

PyObject* held_bytes(PyObject*, PyObject*) { return PyLong_FromLongLong(memory().held_bytes()); }

PyMethodDef methods[] = {
    {"begin", begin, METH_O, "Open the window of an op on this thread."},
    {"end", end, METH_NOARGS, "Close the window of this thread, if one is open."},
    {"live", live, METH_O, "Return how many blocks that an op asked for are in use."},
    {"stop_recording", stop_recording, METH_NOARGS, "Return int64 rows of op, index, bytes, freed in, freed at, address."},
    {"activate", activate, METH_VARARGS, "activate(arena_bytes, alignment, first, bytes, offset, recording)"},
    {"deactivate", deactivate, METH_VARARGS,
     "deactivate(keep) -> hits, misses, missed, peak, high water, list of misses, requested, hit bytes"},
    {"abandon", abandon, METH_NOARGS, "End the step that this thread has open, if any."},
    {"release", release, METH_NOARGS, "Give kept arenas back."},
    {"open_loop", open_loop, METH_O, "open_loop(shared)"},
    {"plan_loop", plan_loop, METH_VARARGS, "plan_loop(arena_bytes, alignment, first, bytes, offset, held, least)"},
    {"loop_counters", loop_counters, METH_NOARGS, "Return what happened since the last call, as deactivate does."},
    {"loop_row", loop_row, METH_NOARGS,
     "Return the kind of the last iteration and int64 rows of offset, end, kind found in the arena."},
    {"iteration", iteration, METH_O, "Return int64 rows of made at, bytes, freed in, freed at of an iteration."},
    {"forget", forget, METH_O, "Drop what an iteration asked for."},
    {"close_loop", close_loop, METH_NOARGS, "End the loop of this thread, if it is in one."},
    {"arena", arena, METH_NOARGS, "Return address and bytes of this thread's arena."},
    {"held_bytes", held_bytes, METH_NOARGS, "Return the bytes of all arenas of the process."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* attribute(const char* module_name, const char* name) {
  PyObject* const module = PyImport_ImportModule(module_name);
  if (module == nullptr) return nullptr;
  PyObject* const value = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return value;
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_olla_replay", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__olla_replay() {
  replay_error = attribute("olla.errors", "ReplayError");
  out_of_memory = attribute("torch", "OutOfMemoryError");
  if (replay_error == nullptr || out_of_memory == nullptr) return nullptr;
  pthread_atfork([] { memory().lock(); }, [] { memory().unlock(); },
                 [] {
                   memory().forked();
                   memory().unlock();
                 });
  return PyModule_Create(&definition);
}
