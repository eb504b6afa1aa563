#include "olla/ilp/ilp_search.hpp"

#include <algorithm>
#include <cmath>

namespace olla {
namespace {

constexpr int kAttempts = 3;

std::string bytes_text(Bytes bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

IlpSearch::IlpSearch(Bytes value, Bytes lower_bound, Bytes grid, const Highs& highs, const IlpOptions& options, Control& control,
                     IlpFigures& figures)
    : value_(value),
      lower_bound_(lower_bound),
      grid_(std::max<Bytes>(grid, 1)),
      highs_(highs),
      options_(options),
      control_(control),
      figures_(figures) {
  lower_bound_ = (lower_bound + grid_ - 1) / grid_ * grid_;
  if (lower_bound_ > value_) {
    throw SolverError("the lower bound of " + bytes_text(lower_bound) + " is false: the start has " + bytes_text(value));
  }
}

void IlpSearch::run(const Build& build) {
  if (value_ > lower_bound_ && !control_.stop(value_, lower_bound_)) {
    attempt(build, lower_bound_, 0.5 * control_.seconds_left());
  }
  for (int i = 0; i < kAttempts && value_ > lower_bound_ && !too_large_; ++i) {
    if (control_.stop(value_, lower_bound_)) break;
    attempt(build, value_, control_.seconds_left());
    if (contradiction_.empty()) break;
  }
  if (!contradiction_.empty() && value_ > lower_bound_) throw SolverError("false optimum: " + contradiction_);
  explain();
}

void IlpSearch::attempt(const Build& build, Bytes target, double time_limit_seconds) {
  const double begin = control_.seconds();
  const TargetProgram program = build(target);
  const double built = control_.seconds();
  figures_.seconds_build += built - begin;
  too_large_ = program.outcome == TargetProgram::Outcome::kTooLarge;
  if (program.outcome == TargetProgram::Outcome::kNoAnswer) rule_out(target);
  if (program.outcome != TargetProgram::Outcome::kBuilt) return;
  figures_.num_columns = program.program->num_columns();
  figures_.num_rows = program.program->num_rows();
  figures_.num_nonzeros = program.program->num_nonzeros();
  solve(program, target, time_limit_seconds - (built - begin));
  figures_.seconds_solve += control_.seconds() - built;
}

void IlpSearch::solve(const TargetProgram& program, Bytes target, double time_limit_seconds) {
  // Answers above the target are not in the program: its bound says nothing about them.
  const auto bound_of = [&](double bound) { return std::min(program.bound_of(bound), target + grid_); };
  MipOptions mip;
  mip.time_limit_seconds = time_limit_seconds;
  mip.seed = options_.seed;
  mip.num_threads = options_.num_threads;
  mip.tolerance = program.tolerance;
  mip.watch = [&](double objective, double bound) {
    const Bytes value = std::isfinite(objective) ? std::min(value_, program.value_of(objective)) : value_;
    return !control_.stop(value, std::min(value, std::max(lower_bound_, bound_of(bound))));
  };
  const MipResult answer = highs_.solve(*program.program, mip, program.start);
  figures_.num_nodes += answer.num_nodes;
  if (answer.status == MipStatus::kInfeasible) return rule_out(target);
  contradiction_.clear();
  if (!answer.values.empty()) {
    const Bytes value = program.keep(answer.values), claimed = program.value_of(answer.objective);
    if (value < lower_bound_) {
      throw SolverError("the lower bound of " + bytes_text(lower_bound_) + " is false: an answer has " + bytes_text(value));
    }
    if (value > claimed || (answer.status == MipStatus::kOptimal && value < claimed)) {
      contradiction_ = "HiGHS claims " + bytes_text(claimed) + ", its answer has " + bytes_text(value);
    }
    value_ = std::min(value_, value);
  }
  if (contradiction_.empty()) raise_bound(bound_of(answer.bound));
}

void IlpSearch::rule_out(Bytes target) {
  if (value_ <= target) {
    throw SolverError("false optimum: the program has no answer of at most " + bytes_text(target) + ", but the start has " +
                      bytes_text(value_));
  }
  raise_bound(target + grid_);
}

void IlpSearch::raise_bound(Bytes bound) { lower_bound_ = std::min(value_, std::max(lower_bound_, bound)); }

void IlpSearch::explain() {
  if (value_ == lower_bound_) {
    figures_.message = "proved: there is no better answer";
  } else if (too_large_) {
    figures_.message = "the program was not built: it needs more than " + std::to_string(options_.max_nonzeros) +
                       " entries, or sizes too far apart for floating point";
  } else {
    figures_.message = control_.cancelled() ? "stopped on request" : "time limit reached; a longer one may close the gap";
  }
}

}  // namespace olla
