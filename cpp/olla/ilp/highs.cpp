#include "olla/ilp/highs.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace olla {
namespace {

// Values of the C interface of HiGHS 1.15.
constexpr int kCallError = -1;
constexpr int kRowwise = 2, kMinimize = 1;
constexpr int kMipImprovingSolution = 4, kMipLogging = 5, kMipInterrupt = 6;
constexpr int kSolutionFeasible = 2;
enum ModelStatus : int {
  kModelEmpty = 6,
  kModelOptimal = 7,
  kModelInfeasible = 8,
  kModelUnboundedOrInfeasible = 9,
  kModelUnbounded = 10
};
enum LimitStatus : int { kBound = 11, kTarget = 12, kTime = 13, kIterations = 14, kSolutions = 16, kInterrupt = 17, kMemory = 18 };

// Only the first member of what HiGHS passes is used; its interface promises to keep it there.
struct CallbackIn {
  int user_interrupt;
};
using Callback = void (*)(int type, const char* message, const void* out, CallbackIn* in, void* user);

constexpr std::chrono::milliseconds kWatchInterval{20};
constexpr double kGraceSeconds = 0.5;
constexpr const char* kRemedy = "; install a newer one: pip install \"highspy>=1.15\"";

// The library, if it is new enough. An address in it converts to a pointer to whatever function it is.
struct HighsLibrary {
  struct Symbol {
    void* address;
    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };

  explicit HighsLibrary(const std::string& name) : path(name) {
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

}  // namespace

struct HighsApi : private HighsLibrary {
  explicit HighsApi(const std::string& name) : HighsLibrary(name) {
    if (const int bytes = size_of_int(nullptr); bytes != 4) {
      throw SolverError(path + " counts in integers of " + std::to_string(bytes) +
                        " bytes, expected 4: use the highspy wheel of PyPI");
    }
  }

  using HighsLibrary::version;
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

namespace {

void require(int status, const std::string& what) {
  if (status == kCallError) throw SolverError("HiGHS failed to " + what);
}

void set_options(const HighsApi& api, void* solver, const MipOptions& options) {
  require(api.set_bool(solver, "output_flag", 0), "set output_flag");
  auto set_double = [&](const char* name, double value) {
    require(api.set_double(solver, name, value), "set " + std::string(name) + " to " + std::to_string(value));
  };
  set_double("time_limit", std::max(0.0, options.time_limit_seconds));
  set_double("mip_rel_gap", 0.0);
  set_double("mip_abs_gap", options.tolerance);
  set_double("mip_feasibility_tolerance", options.tolerance);
  set_double("primal_feasibility_tolerance", std::min(1e-7, options.tolerance));
  require(api.set_int(solver, "random_seed", options.seed), "set random_seed to " + std::to_string(options.seed));
  require(api.set_int(solver, "threads", options.num_threads), "set threads to " + std::to_string(options.num_threads));
}

MipResult result_of(const HighsApi& api, void* solver, Column num_columns) {
  MipResult result;
  const int status = api.model_status(solver);
  int primal = 0;
  api.int_info(solver, "primal_solution_status", &primal);
  api.int64_info(solver, "mip_node_count", &result.num_nodes);
  api.double_info(solver, "mip_dual_bound", &result.bound);
  if (status == kModelInfeasible) {
    result.status = MipStatus::kInfeasible;
    result.bound = Program::kInfinity;
    return result;
  }
  const bool limited = status == kBound || status == kTarget || status == kTime || status == kIterations || status == kSolutions ||
                       status == kInterrupt || status == kMemory;
  if (status != kModelOptimal && status != kModelEmpty && !limited) {
    const bool unbounded = status == kModelUnbounded || status == kModelUnboundedOrInfeasible;
    throw SolverError("HiGHS ended with model status " + std::to_string(status) +
                      (unbounded ? ": the program has no least value" : ", which is neither an answer nor a limit"));
  }
  if (primal == kSolutionFeasible || status == kModelEmpty) {
    result.values.resize(static_cast<std::size_t>(num_columns));
    require(api.solution(solver, result.values.data(), nullptr, nullptr, nullptr), "return its answer");
    api.double_info(solver, "objective_function_value", &result.objective);
    if (status == kModelEmpty) result.objective = 0.0;
    result.status = limited ? MipStatus::kFeasible : MipStatus::kOptimal;
    if (!limited) result.bound = std::max(result.bound, result.objective);
  }
  return result;
}

// One program in the hands of HiGHS, shared by its thread and the one that waits for it.
class Job {
 public:
  Job(const HighsApi& api, const Program& program, const MipOptions& options, std::span<const double> start)
      : api_(api), program_(program), options_(options), start_(start.begin(), start.end()) {}

  // In the caller's thread.
  void stop() { stop_ = true; }
  MipResult so_far() {
    const std::lock_guard lock(mutex_);
    return so_far_;
  }
  std::pair<double, double> progress() {
    const std::lock_guard lock(mutex_);
    return {so_far_.objective, so_far_.bound};
  }

  // In the solver's thread.
  MipResult solve() {
    const std::unique_ptr<void, void (*)(void*)> owner(api_.create(), api_.destroy);
    void* solver = owner.get();
    set_options(api_, solver, options_);
    const Program& p = program_;
    require(api_.pass_mip(solver, p.num_columns(), p.num_rows(), static_cast<int>(p.num_nonzeros()), kRowwise, kMinimize, 0.0,
                          p.cost.data(), p.lower.data(), p.upper.data(), p.row_lower.data(), p.row_upper.data(), p.row_start.data(),
                          p.index.data(), p.value.data(), p.integer.data()),
            "accept the program");
    if (!start_.empty()) require(api_.set_solution(solver, start_.data(), nullptr, nullptr, nullptr), "accept the start");
    require(api_.set_callback(solver, on_callback, this), "accept a callback");
    for (const int type : {kMipImprovingSolution, kMipLogging, kMipInterrupt})
      require(api_.start_callback(solver, type), "start a callback");
    const int status = api_.run(solver);
    require(status, "solve the program (model status " + std::to_string(api_.model_status(solver)) + ")");
    return result_of(api_, solver, p.num_columns());
  }

 private:
  // Nothing may be thrown through HiGHS.
  static void on_callback(int type, const char*, const void* out, CallbackIn* in, void* user) noexcept {
    static_cast<Job*>(user)->note(type, out, in);
  }
  void note(int type, const void* out, CallbackIn* in) {
    const auto item = [&](const char* name) { return static_cast<const double*>(api_.callback_item(out, name)); };
    const std::lock_guard lock(mutex_);
    if (const double* bound = item("mip_dual_bound")) so_far_.bound = std::max(so_far_.bound, *bound);
    const double *objective = item("objective_function_value"), *values = item("mip_solution");
    if (type == kMipImprovingSolution && objective != nullptr && values != nullptr) {
      so_far_.objective = *objective;
      so_far_.values.assign(values, values + program_.num_columns());
      so_far_.status = MipStatus::kFeasible;
    }
    if (stop_ && in != nullptr) in->user_interrupt = 1;
  }

  const HighsApi& api_;
  const Program program_;
  const MipOptions options_;
  const std::vector<double> start_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  MipResult so_far_;
};

}  // namespace

Highs::Highs(const std::string& library_path) {
  static std::mutex mutex;
  static std::map<std::string, HighsApi> opened;  // never closed: HiGHS keeps thread-local state
  const std::lock_guard lock(mutex);
  api_ = &opened.try_emplace(library_path, library_path).first->second;
}

std::string Highs::version() const { return api_->version(); }

MipResult Highs::solve(const Program& program, const MipOptions& options, std::span<const double> start) const {
  if (!start.empty() && start.size() != program.cost.size()) {
    throw SolverError("the start has " + std::to_string(start.size()) + " values, expected one for each of " +
                      std::to_string(program.cost.size()) + " columns");
  }
  const auto job = std::make_shared<Job>(*api_, program, options, start);
  std::packaged_task<MipResult()> solve_program([job] { return job->solve(); });
  std::future<MipResult> answer = solve_program.get_future();
  std::thread solver(std::move(solve_program));
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  double deadline = options.time_limit_seconds;
  bool finished = false;
  try {
    while (!(finished = answer.wait_for(kWatchInterval) == std::future_status::ready) && seconds() < deadline + kGraceSeconds) {
      const auto [objective, bound] = job->progress();
      if (!options.watch || options.watch(objective, bound)) continue;
      job->stop();
      deadline = std::min(deadline, seconds());
    }
  } catch (...) {
    job->stop();
    solver.detach();
    throw;
  }
  job->stop();
  if (finished) {
    solver.join();
    return answer.get();
  }
  solver.detach();
  return job->so_far();
}

}  // namespace olla
