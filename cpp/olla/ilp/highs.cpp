#include "olla/ilp/highs.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <numeric>
#include <tuple>

namespace olla {
namespace {

// Values of HiGHS 1.15.
constexpr int kSolutionFeasible = 2;
enum ModelStatus : int {
  kModelEmpty = 6,
  kModelOptimal = 7,
  kModelInfeasible = 8,
  kModelUnboundedOrInfeasible = 9,
  kModelUnbounded = 10
};
enum LimitStatus : int { kBound = 11, kTarget = 12, kTime = 13, kIterations = 14, kSolutions = 16, kInterrupt = 17, kMemory = 18 };

constexpr std::chrono::milliseconds kWatchInterval{20};
constexpr double kGraceSeconds = 0.5;

std::vector<HighsOption> options_of(const MipOptions& options) {
  return {{"output_flag", false},
          {"time_limit", std::max(0.0, options.time_limit_seconds)},
          {"mip_rel_gap", 0.0},
          {"mip_abs_gap", options.tolerance},
          {"mip_feasibility_tolerance", options.tolerance},
          {"primal_feasibility_tolerance", std::min(1e-7, options.tolerance)},
          {"random_seed", options.seed},
          {"threads", options.num_threads}};
}

MipResult result_of(HighsEnd end) {
  MipResult result;
  result.bound = end.bound;
  result.num_nodes = end.num_nodes;
  const int status = end.model_status;
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
  if (end.primal_status == kSolutionFeasible || status == kModelEmpty) {
    result.values = std::move(end.values);
    result.objective = status == kModelEmpty ? 0.0 : end.objective;
    result.status = limited ? MipStatus::kFeasible : MipStatus::kOptimal;
    if (!limited) result.bound = std::max(result.bound, result.objective);
  }
  return result;
}

// What the solver's thread works on: it may outlive the call.
struct Job {
  const std::shared_ptr<const HighsEngine> engine;
  const Program program;
  const std::vector<HighsOption> options;
  const std::vector<double> start;
  HighsProgress progress;
  std::promise<MipResult> answer;

  void solve() noexcept {
    try {
      HighsEnd end = engine->run(program, options, start, progress);
      if (!start.empty() && end.model_status == kModelOptimal && contradicts_itself(end)) {
        end = engine->run(program, options, {}, progress);
      }
      answer.set_value(result_of(std::move(end)));
    } catch (...) {
      answer.set_exception(std::current_exception());
    }
  }

  // HiGHS 1.16 returns the start for an optimum that presolve alone finds, with the objective of the optimum.
  bool contradicts_itself(const HighsEnd& end) const {
    const double worth = std::inner_product(end.values.begin(), end.values.end(), program.cost.begin(), 0.0);
    return std::abs(worth - end.objective) > 1e-6 * std::max(1.0, std::abs(end.objective));
  }

  MipResult so_far() const {
    MipResult result;
    result.values = progress.values();
    std::tie(result.objective, result.bound) = progress.objective_and_bound();
    if (!result.values.empty()) result.status = MipStatus::kFeasible;
    return result;
  }
};

}  // namespace

Highs::Highs(const std::string& library_path) : Highs(highs_library(library_path)) {}

MipResult Highs::solve(const Program& program, const MipOptions& options, std::span<const double> start) const {
  if (!start.empty() && start.size() != program.cost.size()) {
    throw SolverError("the start has " + std::to_string(start.size()) + " values, expected one for each of " +
                      std::to_string(program.cost.size()) + " columns");
  }
  const std::shared_ptr<Job> job(new Job{engine_, program, options_of(options), {start.begin(), start.end()}, {}, {}});
  std::future<MipResult> answer = job->answer.get_future();
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const std::function<void()> join = engine_->begin([job] { job->solve(); });
  double deadline = options.time_limit_seconds;
  bool finished = false;
  try {
    while (!(finished = answer.wait_for(kWatchInterval) == std::future_status::ready) && seconds() < deadline + kGraceSeconds) {
      const auto [objective, bound] = job->progress.objective_and_bound();
      if (!options.watch || options.watch(objective, bound)) continue;
      job->progress.stop();
      deadline = std::min(deadline, seconds());
    }
  } catch (...) {
    job->progress.stop();
    throw;
  }
  job->progress.stop();
  if (!finished) return job->so_far();
  join();
  return answer.get();
}

}  // namespace olla
