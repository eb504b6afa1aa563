// One run of HiGHS, whatever brings it: the C interface of its shared library (highs_library), or highspy's own extension
// (bindings).
#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "olla/base/error.hpp"
#include "olla/ilp/program.hpp"

namespace olla {

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

}  // namespace olla
