// Common part of the searches by integer program, which minimise the value of an answer in bytes.
#pragma once

#include <memory>

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

  void measure(const Program& program) {
    num_columns = program.num_columns();
    num_rows = program.num_rows();
    num_nonzeros = program.num_nonzeros();
  }
};

// The program of one target, and how to read it.
struct Attempt {
  std::unique_ptr<const TargetProgram> program;
  std::function<std::vector<double>()> start;          // the best answer so far, whose value is within the target; may be empty
  std::function<Bytes(std::span<const double>)> keep;  // simulates an answer, keeps it if it is the best: its true value
};

// How messages speak of answers and values.
struct IlpWords {
  std::string answer = "answer", value = "", its = "";
  std::string none = "false optimum: the program has no answer of at most ", blame = "";  // before and after what contradicts it
};

// One search. value: of the best answer so far; lower_bound: proven, never above it.
class IlpSearch {
 public:
  using Build = std::function<Attempt(Bytes target)>;

  // grid: values differ by multiples of it. Throws SolverError if lower_bound is above value.
  IlpSearch(Bytes value, Bytes lower_bound, Bytes grid, const Highs& highs, const IlpOptions& options, Control& control,
            IlpFigures& figures, IlpWords words = {});

  // First asks, with half of the time, for an answer that meets the bound, then for the best one. Floating point is not trusted:
  // an answer's claimed value is compared with its true one, and a program that contradicts itself gives no bound. Throws
  // SolverError after the third contradiction, and where a reached value is below the bound.
  void run(const Build& build);

  // The parts of run(): one program, the search for the best answer, what it ends with.
  void attempt(const Build& build, Bytes target, double time_limit_seconds);
  void prove(const Build& build);
  void finish();

  Bytes value() const { return value_; }
  Bytes lower_bound() const { return lower_bound_; }
  bool open() const { return value_ > lower_bound_; }
  bool stop() { return control_.stop(value_, lower_bound_); }
  bool too_large() const { return too_large_; }
  bool contradicted() const { return !contradiction_.empty(); }
  Bytes rounding_bytes() const { return rounding_; }  // of the last program that was solved

 private:
  void solve(const Attempt& attempt, Bytes target, double time_limit_seconds);
  void rule_out(Bytes target);
  void raise_bound(Bytes bound) { lower_bound_ = std::min(value_, std::max(lower_bound_, bound)); }

  Bytes value_, lower_bound_;
  const Bytes grid_;
  const Highs& highs_;
  const IlpOptions& options_;
  Control& control_;
  IlpFigures& figures_;
  const IlpWords words_;
  Bytes rounding_ = 0;
  bool too_large_ = false;
  std::string contradiction_;  // about the last answer
};

}  // namespace olla
