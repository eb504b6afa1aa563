// Mixed-integer programs solved by HiGHS, with limits that hold.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "olla/ilp/highs_engine.hpp"
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
