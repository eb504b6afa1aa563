// The extension module of a device: windows, recordings and tables for Python. Plain C API, because a window opens and closes
// around every op. Arrays travel as buffers of native int64.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "allocator.hpp"

namespace {

using namespace olla::replay;

PyObject* replay_error = nullptr;
PyObject* out_of_memory = nullptr;

// Keeps only the first line of a message.
PyObject* refused(const std::string& what) {
  PyErr_SetString(replay_error, what.substr(0, what.find('\n')).c_str());
  return nullptr;
}

// Runs `body` (void returns None) and turns C++ exceptions into a ReplayError or an out-of-memory error.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Body>>) {
      body();
      Py_RETURN_NONE;
    } else {
      return body();
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const OutOfMemory& error) {
    PyErr_SetString(out_of_memory, error.what());
    return nullptr;
  } catch (const c10::Error& error) {
    return refused(error.what_without_backtrace());  // resolving the backtrace's symbols takes torch minutes
  } catch (const std::exception& error) {
    return refused(error.what());
  }
}

template <void (Memory::*call)()>
PyObject* plain(PyObject*, PyObject*) {
  return guarded([] { (memory().*call)(); });
}

// Calls `body` with the number of an op or iteration; numbers out of range become kNoOp.
template <class Body>
PyObject* with_op(PyObject* number, const Body& body) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  return guarded([&] { return body(value < 0 || value > INT32_MAX ? kNoOp : static_cast<OpId>(value)); });
}

PyObject* begin(PyObject*, PyObject* number) {
  return with_op(number, [](OpId op) { memory().begin(op); });
}

PyObject* live(PyObject*, PyObject* number) {
  return with_op(number, [](OpId op) { return PyLong_FromLongLong(memory().live(op)); });
}

PyObject* bytes_of(const std::vector<std::int64_t>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t));
}

PyObject* stop_recording(PyObject*, PyObject*) {
  return guarded([] {
    std::vector<std::int64_t> rows;
    for (const auto& a : memory().stop_recording())
      rows.insert(rows.end(), {a.op, a.index, a.bytes, a.freed_in, a.freed_at, reinterpret_cast<std::intptr_t>(a.block)});
    return bytes_of(rows);
  });
}

// Holder of a "y*" argument: a buffer of native int64.
struct Numbers {
  Py_buffer buffer{};

  ~Numbers() { PyBuffer_Release(&buffer); }
  std::vector<std::int64_t> copied() const {
    std::vector<std::int64_t> values(buffer.len / sizeof(std::int64_t));
    if (!values.empty()) std::memcpy(values.data(), buffer.buf, values.size() * sizeof(std::int64_t));
    return values;
  }
};

PyObject* activate(PyObject*, PyObject* args) {
  long long arena_bytes = 0, alignment = 0, load = 0;
  int recording = 0;
  Numbers first, bytes, offset;
  if (!PyArg_ParseTuple(args, "LLy*y*y*Lp", &arena_bytes, &alignment, &first.buffer, &bytes.buffer, &offset.buffer, &load,
                        &recording))
    return nullptr;
  return guarded([&] {
    install();
    Plan plan{arena_bytes, alignment, first.copied(), bytes.copied(), offset.copied()};
    if (load >= 0) plan.load = load;
    memory().activate(std::move(plan), recording != 0);
  });
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
  return Py_BuildValue("(LLLLLNLLLL)", number(counters.num_hits), number(counters.num_misses), number(counters.missed_bytes),
                       number(counters.peak_bytes), number(counters.high_water_bytes), misses, number(counters.requested_bytes),
                       number(counters.hit_bytes), number(counters.total_peak_bytes), number(counters.given_bytes));
}

PyObject* deactivate(PyObject*, PyObject* args) {
  int keep = 0;
  if (!PyArg_ParseTuple(args, "p", &keep)) return nullptr;
  return guarded([&] { return tuple_of(memory().deactivate(keep != 0)); });
}

PyObject* open_loop(PyObject*, PyObject* shared) {
  const int value = PyObject_IsTrue(shared);
  if (value < 0) return nullptr;
  return guarded([&] {
    install();
    memory().open_loop(value != 0);
  });
}

PyObject* plan_loop(PyObject*, PyObject* args) {
  long long arena_bytes = 0, alignment = 0;
  int no_more = 0;
  Numbers first, bytes, offset, held, least;
  if (!PyArg_ParseTuple(args, "LLy*y*y*y*y*p", &arena_bytes, &alignment, &first.buffer, &bytes.buffer, &offset.buffer, &held.buffer,
                        &least.buffer, &no_more))
    return nullptr;
  return guarded([&] {
    memory().plan_loop({arena_bytes, alignment, first.copied(), bytes.copied(), offset.copied(), held.copied(), least.copied()},
                       no_more != 0);
  });
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
  return with_op(number, [](OpId op) {
    std::vector<std::int64_t> rows;
    for (const auto& a : memory().iteration(op)) rows.insert(rows.end(), {a.made_at, a.bytes, a.freed_in, a.freed_at});
    return bytes_of(rows);
  });
}

PyObject* forget(PyObject*, PyObject* number) {
  return with_op(number, [](OpId op) { memory().forget(op); });
}

PyObject* arena(PyObject*, PyObject*) {
  const auto [base, bytes] = memory().arena();
  return Py_BuildValue("(NL)", PyLong_FromVoidPtr(base), static_cast<long long>(bytes));
}

PyObject* held_bytes(PyObject*, PyObject*) { return PyLong_FromLongLong(memory().held_bytes()); }

PyMethodDef methods[] = {
    {"begin", begin, METH_O, "Open the window of an op on this thread."},
    {"end", plain<&Memory::end>, METH_NOARGS, "Close the window of this thread, if one is open."},
    {"live", live, METH_O, "Return how many blocks that an op asked for are in use."},
    {"stop_recording", stop_recording, METH_NOARGS, "Return int64 rows of op, index, bytes, freed in, freed at, address."},
    {"activate", activate, METH_VARARGS, "activate(arena_bytes, alignment, first, bytes, offset, load, recording)"},
    {"deactivate", deactivate, METH_VARARGS,
     "deactivate(keep) -> hits, misses, missed, peak, high water, list of misses, requested, hit, total peak, given bytes"},
    {"abandon", plain<&Memory::abandon>, METH_NOARGS, "End the step that this thread has open, if any."},
    {"release", plain<&Memory::release>, METH_NOARGS, "Give kept arenas back."},
    {"open_loop", open_loop, METH_O, "open_loop(shared)"},
    {"plan_loop", plan_loop, METH_VARARGS, "plan_loop(arena_bytes, alignment, first, bytes, offset, held, least, no_more)"},
    {"unplan_loop", plain<&Memory::unplan_loop>, METH_NOARGS, "Let the loop go on without a plan, and its arena go."},
    {"loop_counters", loop_counters, METH_NOARGS, "Return what happened since the last call, as deactivate does."},
    {"loop_row", loop_row, METH_NOARGS,
     "Return the kind of the last iteration and int64 rows of offset, end, kind found in the arena."},
    {"iteration", iteration, METH_O, "Return int64 rows of made at, bytes, freed in, freed at of an iteration."},
    {"forget", forget, METH_O, "Drop what an iteration asked for."},
    {"close_loop", plain<&Memory::close_loop>, METH_NOARGS, "End the loop of this thread, if it is in one."},
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
