#include "olla/ilp/ilp_search.hpp"

#include <algorithm>
#include <cmath>

namespace olla {
namespace {

constexpr int kAttempts = 3;

std::string bytes_text(Bytes bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

IlpSearch::IlpSearch(Bytes value, Bytes lower_bound, Bytes grid, const Highs& highs, const IlpOptions& options, Control& control,
                     IlpFigures& figures, IlpWords words)
    : value_(value),
      lower_bound_(value - (value - lower_bound) / grid * grid),
      grid_(grid),
      highs_(highs),
      options_(options),
      control_(control),
      figures_(figures),
      words_(std::move(words)) {
  if (lower_bound > value) {
    throw SolverError("the lower bound of " + bytes_text(lower_bound) + " is false: the start has " + words_.value +
                      bytes_text(value));
  }
}

void IlpSearch::run(const Build& build) {
  if (open() && !stop()) attempt(build, lower_bound_, 0.5 * control_.seconds_left());
  prove(build);
  finish();
}

void IlpSearch::prove(const Build& build) {
  for (int i = 0; i < kAttempts && open() && !too_large_ && !stop(); ++i) {
    attempt(build, value_, control_.seconds_left());
    if (!contradicted()) break;
  }
}

void IlpSearch::attempt(const Build& build, Bytes target, double time_limit_seconds) {
  using Outcome = TargetProgram::Outcome;
  const double begin = control_.seconds();
  const Attempt attempt = build(target);
  const double built = control_.seconds();
  figures_.seconds_build += built - begin;
  const Outcome outcome = attempt.program->outcome();
  too_large_ = outcome == Outcome::kTooLarge;
  if (outcome == Outcome::kNoAnswer) rule_out(target);
  if (outcome != Outcome::kBuilt) return;
  figures_.measure(attempt.program->program());
  solve(attempt, target, time_limit_seconds - (built - begin));
  figures_.seconds_solve += control_.seconds() - built;
}

void IlpSearch::solve(const Attempt& attempt, Bytes target, double time_limit_seconds) {
  const TargetProgram& program = *attempt.program;
  rounding_ = program.max_rounding_bytes();
  // Answers above the target are not in the program: its bound says nothing about them.
  const auto bound_of = [&](double bound) { return std::min(program.bound_bytes(bound), target + grid_); };
  MipOptions mip{time_limit_seconds, options_.seed, options_.num_threads, program.tolerance(), {}};
  mip.watch = [&](double objective, double bound) {
    const bool known = program.exact() && std::isfinite(objective);
    const Bytes value = known ? std::min(value_, program.value_bytes(objective)) : value_;
    return !control_.stop(value, std::min(value, std::max(lower_bound_, bound_of(bound))));
  };
  const MipResult answer = highs_.solve(program.program(), mip, value_ <= target ? attempt.start() : std::vector<double>{});
  figures_.num_nodes += answer.num_nodes;
  if (answer.status == MipStatus::kInfeasible) return rule_out(target);
  contradiction_.clear();
  if (!answer.values.empty()) {
    const Bytes value = attempt.keep(answer.values), claimed = program.value_bytes(answer.objective);
    if (value < lower_bound_) {
      throw SolverError("the lower bound of " + bytes_text(lower_bound_) + " is false: an " + words_.answer + " has " +
                        words_.value + bytes_text(value));
    }
    if (value > claimed + rounding_ || (answer.status == MipStatus::kOptimal && value < claimed)) {
      contradiction_ = "HiGHS claims " + words_.value + bytes_text(claimed) + ", its " + words_.answer + " has " + words_.its +
                       bytes_text(value);
    }
    value_ = std::min(value_, value);
  }
  if (!contradicted()) raise_bound(bound_of(answer.bound));
}

void IlpSearch::rule_out(Bytes target) {
  if (value_ <= target) {
    throw SolverError(words_.none + bytes_text(target) + ", but the start has " + words_.its + bytes_text(value_) + words_.blame);
  }
  raise_bound(target + grid_);
}

void IlpSearch::finish() {
  if (contradicted() && open()) throw SolverError("false optimum: " + contradiction_);
  if (!open()) {
    figures_.message = "proved: there is no better answer";
  } else if (too_large_) {
    figures_.message = "the program was not built: it needs more than " + std::to_string(options_.max_nonzeros) +
                       " entries, or sizes too far apart for floating point";
  } else {
    figures_.message = control_.cancelled() ? "stopped on request" : "time limit reached; a longer one may close the gap";
  }
}

}  // namespace olla
