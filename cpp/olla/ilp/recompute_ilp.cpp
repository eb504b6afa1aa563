#include "olla/ilp/recompute_ilp.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

namespace olla {
namespace {

constexpr double kRelative = 1e-7;        // floating point that is no claim
constexpr std::int64_t kMaxExact = 5000;  // entries of a program of all values

class Search {
 public:
  Search(RecomputeSearch& search, const Target& target, const Highs& highs, const IlpOptions& options, Control& control)
      : search_(search),
        target_(target),
        highs_(highs),
        options_(options),
        control_(control),
        rewriter_(search.graph(), search.values(), search.rules(), search.base()),
        best_(search.evictor().rewrite()),
        decisions_(search.evictor().decisions()) {
    for (const double seconds : search.rules().seconds) total_seconds_ += seconds;
    meets_ = fits(best_);
    bound_ = target.least_time ? std::max(0.0, target.added_seconds) : static_cast<double>(target.peak);
  }

  RecomputeIlpResult run() {
    build();
    if (program_ != nullptr && !done()) solve();
    if (done()) {
      result_.status = Status::kOptimal;
      bound_ = value_of(best_);
    }
    explain();
    search_.evictor().reset(decisions_);
    result_.bound = bound_;
    return result_;
  }

 private:
  bool fits(const Rewrite& r) const {
    return target_.least_time ? r.peak <= target_.peak : r.added_seconds <= target_.added_seconds + slack_seconds();
  }
  double slack_seconds() const { return kRelative * total_seconds_; }
  double value_of(const Rewrite& r) const { return target_.least_time ? r.added_seconds : static_cast<double>(r.peak); }
  double slack() const { return target_.least_time ? slack_seconds() : kRelative * static_cast<double>(best_.peak); }
  bool done() const { return meets_ && value_of(best_) <= bound_ + 2 * slack(); }  // the bound has given one of them

  void build() {
    const double begin = control_.seconds();
    Rewrite plain;
    rewriter_.build(DropSet(search_.values().num_values()), plain);
    const Bytes most = std::max(best_.peak, target_.peak);
    for (const bool prune : {false, true}) {
      program_ = std::make_unique<RecomputeProgram>(search_, plain, target_, most, prune,
                                                    prune ? options_.max_nonzeros : std::min(options_.max_nonzeros, kMaxExact));
      result_.pruned = prune;
      if (!program_->too_large()) break;
      program_.reset();
    }
    result_.figures.seconds_build = control_.seconds() - begin;
  }

  void solve() {
    while (!done() && !control_.stop(best_.peak, target_.peak) && !infeasible_) {
      infeasible_ = program_->impossible();
      if (infeasible_) break;
      const double begin = control_.seconds();
      result_.figures.measure(program_->program());
      const MipResult answer = ask();
      result_.figures.seconds_solve += control_.seconds() - begin;
      result_.figures.num_nodes += answer.num_nodes;
      if (answer.status == MipStatus::kInfeasible) {
        infeasible_ = true;
      } else {
        const double proved = objective(answer.bound);
        if (std::isfinite(proved)) bound_ = std::max(bound_, proved - slack());  // never above the truth
      }
      if (answer.values.empty()) break;
      simulate(answer);
    }
    if (meets_) bound_ = infeasible_ ? value_of(best_) : std::min(bound_, value_of(best_));
  }

  double objective(double of_program) const {
    return target_.least_time ? program_->added_seconds(of_program) : program_->peak(of_program);
  }

  MipResult ask() {
    const MipOptions mip{.time_limit_seconds = control_.seconds_left(),
                         .seed = options_.seed,
                         .num_threads = options_.num_threads,
                         .watch = [&](double, double) { return !control_.stop(best_.peak, target_.peak); }};
    return highs_.solve(program_->program(), mip, meets_ ? program_->encode(best_) : std::vector<double>{});
  }

  void simulate(const MipResult& answer) {
    DropSet drops(search_.values().num_values());
    Decision decision = program_->decode(answer.values);
    std::erase_if(decision, [&](const Drop& drop) { return !drops.add(drop); });
    Rewrite found;
    ++result_.num_answers;
    const bool runs = rewriter_.build(drops, found);
    const double claimed = objective(answer.objective);
    if (!runs || (target_.least_time && found.added_seconds > claimed + 10 * slack_seconds())) {
      const std::string truth = runs ? "adds " + std::to_string(found.added_seconds) + " seconds" : "cannot run";
      throw SolverError("false optimum: the budget program claims " + std::to_string(claimed) + ", its answer " + truth);
    }
    const bool better = fits(found) && (!meets_ || value_of(found) < value_of(best_));
    const Bytes limit = target_.least_time ? target_.peak : static_cast<Bytes>(claimed + slack() + 0.5);
    if (found.peak > limit) program_->cut_off(found, limit);
    if (better) {
      best_ = std::move(found);
      decisions_.assign(1, std::move(decision));
      meets_ = true;
    }
  }

  void explain() {
    std::string& message = result_.figures.message;
    if (result_.status == Status::kOptimal) {
      message = "proved";
    } else if (program_ == nullptr) {
      message = "the program was not built: it needs more than " + std::to_string(options_.max_nonzeros) + " entries";
    } else if (infeasible_ && !meets_) {
      result_.status = Status::kInfeasible;
      message = "proved: nothing fits";
    } else {
      message = control_.cancelled() ? "stopped on request" : "time limit reached; a longer one may close the gap";
    }
  }

  RecomputeSearch& search_;
  const Target target_;
  const Highs& highs_;
  const IlpOptions& options_;
  Control& control_;
  Rewriter rewriter_;
  std::unique_ptr<RecomputeProgram> program_;
  double total_seconds_ = 0, bound_ = 0;
  bool meets_ = false, infeasible_ = false;
  Rewrite best_;
  std::vector<Decision> decisions_;
  RecomputeIlpResult result_;
};

}  // namespace

RecomputeIlpResult recompute_ilp(RecomputeSearch& search, const Target& target, const Highs& highs, const IlpOptions& options,
                                 Control& control) {
  return Search(search, target, highs, options, control).run();
}

}  // namespace olla
