#include "olla/recompute/evict.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace olla {
namespace {

// When no drop lowers the peak, reach grows by kFurther, up to kFurthest: ancestors further back may be recomputed.
constexpr double kFurther = 8.0, kFurthest = 600;
constexpr int kMaxDeep = 24, kMaxRepairs = 32, kMaxRepairTries = 12;
constexpr std::int64_t kRepairWork = 6'000'000;  // of one run of the greedy

constexpr int kClockInterval = 64;  // candidates per look at the clock: one of them may need very many values

constexpr double kSure = 0.5;  // a decision surely adds this share of its estimated seconds; if that is too much, it is not tried

}  // namespace

bool Evictor::Effort::raise() {
  if (deep) reach *= kFurther;
  deep = true;
  return reach < kFurthest;
}

Evictor::Evictor(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base)
    : graph_(graph),
      values_(values),
      rules_(rules),
      rewriter_(graph, values, rules, base),
      drops_(values.num_values()),
      at_peak_(graph, values, rules, drops_) {
  rewriter_.build(drops_, best_);
  curve_.push_back(point());
  front_.offer(curve_, decisions_);
}

void Evictor::run(const EvictLimits& limits, Control& control) {
  curve_.assign(1, point());
  drop_until(limits, control);
  front_.offer(curve_, decisions_);
}

void Evictor::drop_until(const EvictLimits& limits, Control& control) {
  bool progress = true;  // since tabu_ was last cleared
  effort_ = {};
  repair_work_ = kRepairWork;
  while (best_.peak > limits.peak && best_.peak_run >= 0 && !control.stop(best_.peak, limits.peak)) {
    if (step(limits, control)) {
      curve_.push_back(point());
      progress = true;
      effort_ = {};
      continue;
    }
    if (!progress && !effort_.raise()) return;
    tabu_.clear();
    progress = false;
  }
}

// One more decision that lowers the peak, or false.
bool Evictor::step(const EvictLimits& limits, Control& control) {
  Decision decision;
  peak_ = best_.peak_run;
  at_peak_.look(best_, peak_);
  const std::vector<Candidate> candidates = find_candidates(control);
  control.spend(best_.num_runs() + at_peak_.take_work() / 8);
  int num_tried = 0;
  for (const Candidate& candidate : candidates) {
    if ((effort_.deep && num_tried >= kMaxDeep) || (repairing_ && num_tried >= kMaxRepairTries)) return false;
    Bytes freed = 0;
    double seconds = 0;
    decision.clear();
    at_peak_.estimate(candidate.copy, effort_.reach, decision, freed, seconds);
    if (best_.added_seconds + kSure * seconds > limits.added_seconds) continue;
    ++num_tried;
    control.spend(best_.num_runs());
    if (attempt(decision, limits.added_seconds)) return true;
    const auto gap = at_peak_.key(candidate.copy);
    if (effort_.deep && !repairing_ && repair_work_ > 0) {
      if (attempt_with_repairs(decision, limits, control)) return true;
      peak_ = best_.peak_run;
      at_peak_.look(best_, peak_);
    }
    tabu_.insert(gap);
    if (control.over()) return false;
  }
  return false;
}

// Accepts a decision that raises memory elsewhere if further ones lower it again.
bool Evictor::attempt_with_repairs(const Decision& decision, const EvictLimits& limits, Control& control) {
  const OpId at_op = best_.runs[peak_].op;
  const Step at_position = best_.runs[peak_].position;
  if (!drops_.add(decision)) return false;
  if (!rewriter_.build(drops_, trial_) || trial_.added_seconds > limits.added_seconds) {
    drops_.remove(decision);
    return false;
  }
  const Rewrite before = best_;
  const auto tabu = tabu_;
  const std::size_t num_decisions = decisions_.size();
  std::swap(best_, trial_);
  decisions_.push_back(decision);
  repairing_ = true;
  bool done = false;
  const std::int64_t work_left = control.work_left();
  for (int i = 0; i < kMaxRepairs && !done && !control.over(); ++i) {
    if (best_.peak <= before.peak && live_at(best_, at_op, at_position) < before.peak) {
      done = true;
    } else if (best_.peak_run < 0 || !step(limits, control)) {
      break;
    }
  }
  repairing_ = false;
  repair_work_ -= work_left - control.work_left() + before.num_runs();
  if (done) return true;
  tabu_ = tabu;
  while (decisions_.size() > num_decisions) {
    drops_.remove(decisions_.back());
    decisions_.pop_back();
  }
  best_ = before;
  return false;
}

Bytes Evictor::live_at(const Rewrite& r, OpId op, Step position) {
  const auto at = std::ranges::lower_bound(r.runs, position, {}, &Rewrite::Run::position);
  const auto same = [&](const Rewrite::Run& run) { return run.op == op && run.position == position && !run.dead; };
  const auto found = std::find_if(at, r.runs.end(), same);
  return found == r.runs.end() ? 0 : r.live[found - r.runs.begin()];
}

bool Evictor::attempt(const Decision& decision, double most_seconds) {
  if (!drops_.add(decision)) return false;
  const OpId op = best_.runs[peak_].op;
  const Step position = best_.runs[peak_].position;
  if (!rewriter_.build(drops_, trial_) || trial_.peak > best_.peak || trial_.added_seconds > most_seconds ||
      live_at(trial_, op, position) >= best_.peak) {
    drops_.remove(decision);
    return false;
  }
  std::swap(best_, trial_);
  decisions_.push_back(decision);
  return true;
}

// The candidates at the peak, most bytes freed per second first.
std::vector<Evictor::Candidate> Evictor::find_candidates(Control& control) {
  std::vector<Candidate> candidates;
  Decision decision;
  if (score_weights_.spread > 0) {
    above_.assign(1, 0.0);
    for (const Bytes live : best_.live)
      above_.push_back(above_.back() + static_cast<double>(std::max<Bytes>(0, live - score_weights_.level)));
  }
  int num_estimated = 0;
  for (CopyId c = 0; c < static_cast<CopyId>(best_.copies.size()); ++c) {
    if (!at_peak_.is_candidate(c) || tabu_.contains(at_peak_.key(c))) continue;
    if (num_estimated++ % kClockInterval == 0 && control.late()) break;
    Bytes freed = 0;
    double seconds = 0;
    decision.clear();
    if (!at_peak_.estimate(c, effort_.reach, decision, freed, seconds) || freed <= 0) continue;
    candidates.push_back({weight(c) * static_cast<double>(freed) / std::max(seconds, kFreeSeconds), c, freed});
  }
  std::ranges::sort(candidates, {}, [](const Candidate& c) { return std::tuple(-c.score, -c.bytes, c.copy); });
  return candidates;
}

Rewritten Evictor::rewritten() {
  rewriter_.build(drops_, best_);  // the last build may have been a refused one
  return rewriter_.graph(best_);
}

bool Evictor::reset(std::vector<Decision> decisions) {
  for (const Decision& decision : decisions_) drops_.remove(decision);
  decisions_ = std::move(decisions);
  for (const Decision& decision : decisions_) {
    for (const Drop& drop : decision) drops_.add(drop);
  }
  tabu_.clear();
  if (rewriter_.build(drops_, best_)) {
    front_.offer({{point()}}, decisions_);
    return true;
  }
  reset({});
  return false;
}

void Evictor::set_absent(std::vector<Bytes> absent) {
  rewriter_.set_absent(std::move(absent));
  tabu_.clear();
  rewriter_.build(drops_, best_);
  front_.clear();
  front_.offer({{point()}}, decisions_);
}

void Evictor::set_score_weights(const ScoreWeights& weights) {
  score_weights_ = weights;
  random_.seed(weights.seed);
}

double Evictor::weight(CopyId copy) {
  double weight = 1;
  if (score_weights_.noise > 0) weight += score_weights_.noise * static_cast<double>(random_() >> 11) * 0x1p-53;
  if (score_weights_.spread > 0 && above_.back() > 0) {
    weight *= 1 + score_weights_.spread * (above_[at_peak_.next(copy)] - above_[at_peak_.previous(copy) + 1]) / above_.back();
  }
  return weight;
}

bool Evictor::take_back(std::span<const Drop> drops, Bytes most, Bytes least) {
  drops_.remove(drops);
  const bool fits = rewriter_.build(drops_, trial_) && trial_.peak <= most && trial_.peak >= least;
  if (fits && trial_.added_seconds <= best_.added_seconds) {
    std::swap(best_, trial_);
    return true;
  }
  for (const Drop& drop : drops) drops_.add(drop);
  return false;
}

void Evictor::reverse(Bytes most, Control& control, Bytes least) {
  std::vector<std::pair<double, std::size_t>> dearest;
  for (std::size_t i = 0; i < decisions_.size(); ++i) {
    double seconds = 0;
    for (const Drop& drop : decisions_[i]) seconds += rules_.rerun_seconds[values_.producer[drop.value]];
    dearest.emplace_back(-seconds, i);
  }
  std::sort(dearest.begin(), dearest.end());
  for (const auto& [seconds, i] : dearest) {
    if (control.stop(best_.peak, 0)) break;
    Decision& decision = decisions_[i];
    control.spend(best_.num_runs());
    if (take_back(decision, most, least)) {
      decision.clear();
      continue;
    }
    for (std::size_t k = decision.size(); decision.size() > 1 && k-- > 1;) {
      const Drop drop = decision[k];
      control.spend(best_.num_runs());
      if (take_back({&drop, 1}, most, least)) decision.erase(decision.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  std::erase_if(decisions_, [](const Decision& decision) { return decision.empty(); });
  front_.offer({{point()}}, decisions_);
  tabu_.clear();
}

}  // namespace olla
