#include "olla/ilp/highs_library.hpp"

#include <dlfcn.h>

#include <map>
#include <thread>

namespace olla {
namespace {

// Values of the C interface of HiGHS 1.15.
constexpr int kCallError = -1;
constexpr int kRowwise = 2, kMinimize = 1;
constexpr int kMipImprovingSolution = 4, kMipLogging = 5, kMipInterrupt = 6;

// Only the first member of what HiGHS passes is used; its interface promises to keep it there.
struct CallbackIn {
  int user_interrupt;
};
using Callback = void (*)(int type, const char* message, const void* out, CallbackIn* in, void* user);

constexpr const char* kRemedy = "; install a newer one: pip install \"highspy>=1.15\"";

// The library, if it is new enough. An address in it converts to a pointer to whatever function it is.
struct SharedLibrary {
  struct Symbol {
    void* address;
    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };

  explicit SharedLibrary(const std::string& name) : path(name) {
    if (std::pair(version_major(), version_minor()) < std::pair(1, 15)) {
      throw SolverError(path + " is HiGHS " + version() + ", expected 1.15 or later" + kRemedy);
    }
  }

  static void* open(const std::string& path) {
    void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened != nullptr) return opened;
    const char* reason = dlerror();
    throw SolverError("the HiGHS library cannot be opened (" + std::string(reason ? reason : path) +
                      "); install it: pip install \"highspy>=1.15\"");
  }

  Symbol find(const char* name) const {
    if (void* address = dlsym(library, name)) return {address};
    throw SolverError(path + " does not export " + name + ", so it is no HiGHS library of version 1.15 or later" + kRemedy);
  }

  std::string path;
  void* library = open(path);
  int (*version_major)() = find("Highs_versionMajor");
  int (*version_minor)() = find("Highs_versionMinor");
  const char* (*version)() = find("Highs_version");
};

struct Api : SharedLibrary {
  explicit Api(const std::string& name) : SharedLibrary(name) {
    if (const int bytes = size_of_int(nullptr); bytes != 4) {
      throw SolverError(path + " counts in integers of " + std::to_string(bytes) +
                        " bytes, expected 4: use the highspy wheel of PyPI");
    }
  }

  void* (*create)() = find("Highs_create");
  void (*destroy)(void*) = find("Highs_destroy");
  int (*size_of_int)(const void*) = find("Highs_getSizeofHighsInt");
  int (*set_bool)(void*, const char*, int) = find("Highs_setBoolOptionValue");
  int (*set_int)(void*, const char*, int) = find("Highs_setIntOptionValue");
  int (*set_double)(void*, const char*, double) = find("Highs_setDoubleOptionValue");
  int (*pass_mip)(void*, int columns, int rows, int nonzeros, int format, int sense, double offset, const double* cost,
                  const double* lower, const double* upper, const double* row_lower, const double* row_upper, const int* start,
                  const int* index, const double* value, const int* integrality) = find("Highs_passMip");
  int (*set_solution)(void*, const double* column, const double* row, const double* column_dual,
                      const double* row_dual) = find("Highs_setSolution");
  int (*set_callback)(void*, Callback, void*) = find("Highs_setCallback");
  int (*start_callback)(void*, int) = find("Highs_startCallback");
  const void* (*callback_item)(const void* out, const char* name) = find("Highs_getCallbackDataOutItem");
  int (*run)(void*) = find("Highs_run");
  int (*model_status)(const void*) = find("Highs_getModelStatus");
  int (*solution)(const void*, double*, double*, double*, double*) = find("Highs_getSolution");
  int (*int_info)(const void*, const char*, int*) = find("Highs_getIntInfoValue");
  int (*int64_info)(const void*, const char*, std::int64_t*) = find("Highs_getInt64InfoValue");
  int (*double_info)(const void*, const char*, double*) = find("Highs_getDoubleInfoValue");
};

void require(int status, const std::string& what) {
  if (status == kCallError) throw SolverError("HiGHS failed to " + what);
}

// Who reads what HiGHS says during a run.
struct Listener {
  const Api& api;
  HighsProgress& progress;
  std::size_t num_columns;

  // Nothing may be thrown through HiGHS.
  static void hear(int type, const char*, const void* out, CallbackIn* in, void* user) noexcept {
    const auto& [api, progress, num_columns] = *static_cast<Listener*>(user);
    const auto item = [&](const char* name) { return static_cast<const double*>(api.callback_item(out, name)); };
    const double *bound = item("mip_dual_bound"), *objective = item("objective_function_value");
    const double* values = type == kMipImprovingSolution && objective != nullptr ? item("mip_solution") : nullptr;
    const bool stop = progress.note(bound != nullptr ? *bound : -Program::kInfinity, objective != nullptr ? *objective : 0.0,
                                    {values, values != nullptr ? num_columns : 0});
    if (stop && in != nullptr) in->user_interrupt = 1;
  }
};

class LibraryEngine : public HighsEngine {
 public:
  explicit LibraryEngine(const std::string& path) : api_(path) {}

  std::string version() const override { return api_.version(); }

  std::function<void()> begin(std::function<void()> work) const override {
    // Dropped before its end, it goes on by itself.
    const std::shared_ptr<std::thread> thread(new std::thread(std::move(work)), [](std::thread* running) {
      if (running->joinable()) running->detach();
      delete running;
    });
    return [thread] { thread->join(); };
  }

  HighsEnd run(const Program& p, std::span<const HighsOption> options, std::span<const double> start,
               HighsProgress& progress) const override {
    const std::unique_ptr<void, void (*)(void*)> owner(api_.create(), api_.destroy);
    void* solver = owner.get();
    for (const auto& [name, value] : options) set(solver, name, value);
    require(api_.pass_mip(solver, p.num_columns(), p.num_rows(), static_cast<int>(p.num_nonzeros()), kRowwise, kMinimize, 0.0,
                          p.cost.data(), p.lower.data(), p.upper.data(), p.row_lower.data(), p.row_upper.data(), p.row_start.data(),
                          p.index.data(), p.value.data(), p.integer.data()),
            "accept the program");
    if (!start.empty()) require(api_.set_solution(solver, start.data(), nullptr, nullptr, nullptr), "accept the start");
    Listener listener{api_, progress, p.cost.size()};
    require(api_.set_callback(solver, Listener::hear, &listener), "accept a callback");
    for (const int type : {kMipImprovingSolution, kMipLogging, kMipInterrupt})
      require(api_.start_callback(solver, type), "start a callback");
    const int status = api_.run(solver);
    require(status, "solve the program (model status " + std::to_string(api_.model_status(solver)) + ")");
    return end_of(solver, p.cost.size());
  }

 private:
  void set(void* solver, const char* name, const std::variant<bool, int, double>& value) const {
    const auto told = [&](int status, const auto& text) { require(status, "set " + std::string(name) + " to " + text); };
    if (const bool* flag = std::get_if<bool>(&value)) told(api_.set_bool(solver, name, *flag), *flag ? "true" : "false");
    if (const int* number = std::get_if<int>(&value)) told(api_.set_int(solver, name, *number), std::to_string(*number));
    if (const double* real = std::get_if<double>(&value)) told(api_.set_double(solver, name, *real), std::to_string(*real));
  }

  HighsEnd end_of(void* solver, std::size_t num_columns) const {
    HighsEnd end{.model_status = api_.model_status(solver), .values = std::vector<double>(num_columns)};
    api_.int_info(solver, "primal_solution_status", &end.primal_status);
    api_.int64_info(solver, "mip_node_count", &end.num_nodes);
    api_.double_info(solver, "mip_dual_bound", &end.bound);
    api_.double_info(solver, "objective_function_value", &end.objective);
    require(api_.solution(solver, end.values.data(), nullptr, nullptr, nullptr), "return its answer");
    return end;
  }

  const Api api_;
};

}  // namespace

std::shared_ptr<const HighsEngine> highs_library(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const HighsEngine>> opened;  // never closed: HiGHS keeps thread-local state
  const std::lock_guard lock(mutex);
  std::shared_ptr<const HighsEngine>& engine = opened[path];
  if (!engine) engine = std::make_shared<LibraryEngine>(path);
  return engine;
}

}  // namespace olla
