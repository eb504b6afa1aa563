// Mixed-integer programs solved by HiGHS, with limits that hold.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "olla/base/error.hpp"
#include "olla/ilp/program.hpp"

namespace olla {

enum class MipStatus : std::uint8_t {
  kOptimal,     // values are proved optimal
  kFeasible,    // a limit or a stop request came first; values hold the best answer
  kInfeasible,  // proved: no answer exists
  kUnknown      // a limit or a stop request came before any answer
};

// The answer so far and the bound; false asks the solver to stop with the best it has. Called in the thread that called solve().
using MipWatch = std::function<bool(double objective, double bound)>;

struct MipOptions {
  double time_limit_seconds = Program::kInfinity;
  std::int32_t seed = 0;
  std::int32_t num_threads = 1;
  double tolerance = 1e-6;  // of bounds, rows and integrality, absolute
  MipWatch watch;           // may be empty
};

struct MipResult {
  MipStatus status = MipStatus::kUnknown;
  double objective = Program::kInfinity;
  double bound = -Program::kInfinity;  // no answer is below it, up to the tolerance
  std::vector<double> values;          // of column j; empty without an answer
  std::int64_t num_nodes = 0;
};

using HighsOption = std::pair<const char*, std::variant<bool, int, double>>;  // name in HiGHS, value

// What HiGHS says at the end of a run, in its own numbers.
struct HighsEnd {
  int model_status = 0, primal_status = 0;
  std::int64_t num_nodes = 0;
  double bound = -Program::kInfinity, objective = Program::kInfinity;
  std::vector<double> values;  // of column j, meaningful where primal_status says so
};

// What a run says while it lasts, shared by its thread and the one that waits for it.
class HighsProgress {
 public:
  // In the solver's thread. values: of a new best answer, or empty. Returns whether the run should stop.
  bool note(double bound, double objective, std::span<const double> values) {
    const std::lock_guard lock(mutex_);
    bound_ = std::max(bound_, bound);
    if (!values.empty()) {
      objective_ = objective;
      values_.assign(values.begin(), values.end());
    }
    return stop_;
  }

  // In the caller's thread.
  void stop() {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  std::pair<double, double> objective_and_bound() const {
    const std::lock_guard lock(mutex_);
    return {objective_, bound_};
  }
  std::vector<double> values() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }

 private:
  mutable std::mutex mutex_;
  bool stop_ = false;
  double objective_ = Program::kInfinity, bound_ = -Program::kInfinity;
  std::vector<double> values_;
};

// One run of HiGHS, whatever brings it: its shared library, or highspy's own extension (bindings).
class HighsEngine {
 public:
  virtual ~HighsEngine() = default;
  virtual std::string version() const = 0;  // "1.15.1"

  // Runs work in a thread of its own; the function that comes back waits for its end, and may be dropped.
  virtual std::function<void()> begin(std::function<void()> work) const = 0;

  // Solves the program to its end or to a limit, in the thread that calls it. start: a value for every column, or empty.
  // Throws SolverError if HiGHS refuses the program or an option, or fails.
  virtual HighsEnd run(const Program& program, std::span<const HighsOption> options, std::span<const double> start,
                       HighsProgress& progress) const = 0;
};

// HiGHS by its C interface, taken at run time from a shared library, such as the one that highspy 1.15 brings: no header of HiGHS
// is needed and no copy of it is built. The library stays in memory until the process ends. Throws SolverError where it is
// missing, is no HiGHS, is older than 1.15 or counts in 64-bit integers.
std::shared_ptr<const HighsEngine> highs_library(const std::string& path);

// Thread safety: any number of threads may call solve() at once. Every call runs HiGHS in a thread of its own, because HiGHS keeps
// its pool of workers per thread, and because it looks at its clock and at stop requests only between its stages, seconds apart in
// a large program. The caller's thread meanwhile watches and ends together with the solver's; half a second after a limit or a stop
// request it returns with the best answer so far, and the solver's thread ends by itself at the next look.
class Highs {
 public:
  explicit Highs(std::shared_ptr<const HighsEngine> engine) : engine_(std::move(engine)) {}

  // By a shared library; throws as highs_library() does.
  explicit Highs(const std::string& library_path);

  std::string version() const { return engine_->version(); }

  // Proves gap zero or runs into a limit. start: a value for every column, or empty; ignored by HiGHS if it breaks a row.
  // Throws SolverError if HiGHS refuses the program or fails, and what options.watch throws.
  MipResult solve(const Program& program, const MipOptions& options, std::span<const double> start) const;

 private:
  std::shared_ptr<const HighsEngine> engine_;
};

}  // namespace olla
