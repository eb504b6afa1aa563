// What the searches by integer program have in common: an answer has a value in bytes that should be small, and a program describes
// the answers whose value is at most a target.
#pragma once

#include "olla/base/control.hpp"
#include "olla/ilp/highs.hpp"

namespace olla {

struct IlpOptions {
  std::int32_t seed = 0;
  std::int32_t num_threads = 1;
  std::int64_t max_nonzeros = 2'000'000;  // beyond it a program is not built
};

// What happened on the way; the sizes are those of the last program.
struct IlpFigures {
  std::string message;  // why it ended, for a person
  Column num_columns = 0;
  std::int64_t num_rows = 0, num_nonzeros = 0, num_nodes = 0;
  double seconds_build = 0.0, seconds_solve = 0.0;
};

// The program of one target, and how to read it.
struct TargetProgram {
  enum class Outcome : std::uint8_t { kBuilt, kNoAnswer, kTooLarge };

  Outcome outcome = Outcome::kNoAnswer;  // kNoAnswer: proved, no answer has a value <= target
  const Program* program = nullptr;
  double tolerance = 1e-6;
  std::vector<double> start;                           // the best answer so far, or empty
  std::function<Bytes(double)> value_of;               // of an objective
  std::function<Bytes(double)> bound_of;               // of a bound of the objective
  std::function<Bytes(std::span<const double>)> keep;  // simulates an answer, keeps it if it is the best: its true value
};

// One search. value: of the best answer so far; lower_bound: proven, never above it.
class IlpSearch {
 public:
  using Build = std::function<TargetProgram(Bytes target)>;

  // grid: values differ by multiples of it. Throws SolverError if lower_bound is above value.
  IlpSearch(Bytes value, Bytes lower_bound, Bytes grid, const Highs& highs, const IlpOptions& options, Control& control,
            IlpFigures& figures);

  // Asks for an answer that meets the bound, with half of the time, then for the best one. Floating point decides nothing: what an
  // answer claims is compared with its true value, and of a program that contradicts itself no bound is believed.
  // Throws SolverError after the third contradiction, and where a reached value is below the bound.
  void run(const Build& build);

  Bytes value() const { return value_; }
  Bytes lower_bound() const { return lower_bound_; }

 private:
  void attempt(const Build& build, Bytes target, double time_limit_seconds);
  void solve(const TargetProgram& program, Bytes target, double time_limit_seconds);
  void rule_out(Bytes target);
  void raise_bound(Bytes bound);
  void explain();

  Bytes value_, lower_bound_;
  const Bytes grid_;
  const Highs& highs_;
  const IlpOptions& options_;
  Control& control_;
  IlpFigures& figures_;
  bool too_large_ = false;
  std::string contradiction_;  // about the last answer
};

}  // namespace olla
