#include "olla/evict.hpp"

#include <algorithm>
#include <utility>

namespace olla {
namespace {

// How far the ancestors of a dropped value are run again too; beyond, what it needs is kept. Where that finds nothing, it reaches
// further.
constexpr double kClosureFactor = 10.0, kClosureSeconds = 20e-6;
constexpr std::size_t kMaxClosure = 200;
constexpr RunId kBlock = 64;
constexpr double kFurther = 8.0, kFurthest = 600;
constexpr int kMaxDeep = 24, kMaxRepairs = 32, kMaxRepairTries = 12;
constexpr std::int64_t kRepairWork = 6'000'000;  // of one run of the greedy

constexpr double kSure = 0.5;   // share of an estimate of seconds that an attempt is certain to add
constexpr double kFree = 1e-9;  // seconds of a step that costs nothing, so that scores stay finite

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
      closure_of_(graph.num_ops(), 0) {
  rewriter_.build(drops_, best_);
  curve_.push_back({best_.peak, best_.added_seconds});
}

void Evictor::run(const EvictLimits& limits, Control& control) {
  curve_.assign(1, {best_.peak, best_.added_seconds});
  bool progress = true;  // since the refusals were last forgotten
  effort_ = {};
  repair_work_ = kRepairWork;
  while (best_.peak > limits.peak && best_.peak_run >= 0 && !control.stop(best_.peak, limits.peak)) {
    if (step(limits, control)) {
      curve_.push_back({best_.peak, best_.added_seconds});
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
  find_uses();
  find_candidates();
  control.spend(best_.num_runs() + std::exchange(work_, 0) / 8);
  const std::vector<Candidate> candidates = candidates_;
  int num_tried = 0;
  for (const Candidate& candidate : candidates) {
    if ((effort_.deep && num_tried >= kMaxDeep) || (repairing_ && num_tried >= kMaxRepairTries)) return false;
    Bytes freed = 0;
    double seconds = 0;
    decision.clear();
    estimate(candidate.copy, decision, freed, seconds);
    if (best_.added_seconds + kSure * seconds > limits.added_seconds) continue;
    ++num_tried;
    control.spend(best_.num_runs());
    if (attempt(decision, limits.added_seconds)) return true;
    const auto gap = key(candidate.copy);
    if (effort_.deep && !repairing_ && repair_work_ > 0) {
      if (attempt_with_repairs(decision, limits, control)) return true;
      peak_ = best_.peak_run;
      find_uses();
    }
    tabu_.insert(gap);
    if (control.over()) return false;
  }
  return false;
}

// Puts a decision in force that raises memory elsewhere, and lowers that again by further ones.
bool Evictor::attempt_with_repairs(const Decision& decision, const EvictLimits& limits, Control& control) {
  const OpId at_op = best_.runs[peak_].op;
  const Step at_position = best_.runs[peak_].position;
  for (std::size_t i = 0; i < decision.size(); ++i) {
    if (drops_.add(decision[i])) continue;
    while (i-- > 0) drops_.remove(decision[i]);
    return false;
  }
  if (!rewriter_.build(drops_, trial_) || trial_.added_seconds > limits.added_seconds) {
    for (const Drop& drop : decision) drops_.remove(drop);
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
    for (const Drop& drop : decisions_.back()) drops_.remove(drop);
    decisions_.pop_back();
  }
  best_ = before;
  return false;
}

Bytes Evictor::live_at(const Rewrite& r, OpId op, Step position) {
  const auto at =
      std::lower_bound(r.runs.begin(), r.runs.end(), position, [](const Rewrite::Run& run, Step p) { return run.position < p; });
  const auto same = [&](const Rewrite::Run& run) { return run.op == op && run.position == position && !run.dead; };
  const auto found = std::find_if(at, r.runs.end(), same);
  return found == r.runs.end() ? 0 : r.live[found - r.runs.begin()];
}

// A gap of a value, whatever else changes around it.
std::uint64_t Evictor::key(CopyId copy) const {
  const auto position = [&](RunId run) { return run < 0 ? Step{0} : best_.runs[run].position; };
  const auto value = static_cast<std::uint64_t>(best_.copies[copy].value);
  return value << 40 ^ static_cast<std::uint64_t>(position(previous_[copy])) << 20 ^
         static_cast<std::uint64_t>(position(next_[copy]));
}

bool Evictor::attempt(const Decision& decision, double most_seconds) {
  for (std::size_t i = 0; i < decision.size(); ++i) {
    if (drops_.add(decision[i])) continue;
    while (i-- > 0) drops_.remove(decision[i]);
    return false;
  }
  const OpId op = best_.runs[peak_].op;
  const Step position = best_.runs[peak_].position;
  bool better = rewriter_.build(drops_, trial_) && trial_.peak <= best_.peak && trial_.added_seconds <= most_seconds;
  if (better) better = live_at(trial_, op, position) < best_.peak;
  if (!better) {
    for (const Drop& drop : decision) drops_.remove(drop);
    return false;
  }
  std::swap(best_, trial_);
  decisions_.push_back(decision);
  return true;
}

// Last use up to the peak and first use from it on, of every copy; -1 and num_runs where there is none.
void Evictor::find_uses() {
  const auto num_copies = best_.copies.size();
  previous_.assign(num_copies, -1);
  next_.assign(num_copies, best_.num_runs());
  for (RunId run = 0; run <= peak_; ++run) {
    if (best_.runs[run].dead) continue;
    for (const CopyId c : best_.reads_of(run)) previous_[c] = run;
    for (const CopyId c : best_.makes_of(run)) previous_[c] = run;
  }
  for (RunId run = best_.num_runs() - 1; run >= peak_; --run) {
    if (best_.runs[run].dead) continue;
    for (const CopyId c : best_.reads_of(run)) next_[c] = run;
  }
  last_again_.assign(graph_.num_ops(), -1);
  for (RunId run = 0; run < best_.num_runs(); ++run) {
    if (best_.runs[run].again && !best_.runs[run].dead) last_again_[best_.runs[run].op] = run;
  }
  blocks_.assign(best_.live.size() / kBlock + 1, 0);
  for (std::size_t run = 0; run < best_.live.size(); ++run) {
    blocks_[run / kBlock] = std::max(blocks_[run / kBlock], best_.live[run]);
  }
  copies_offset_.assign(values_.num_values() + 1, 0);
  for (const auto& copy : best_.copies) ++copies_offset_[copy.value + 1];
  for (ValueId x = 0; x < values_.num_values(); ++x) copies_offset_[x + 1] += copies_offset_[x];
  copies_of_.resize(num_copies);
  auto at = copies_offset_;
  for (CopyId c = 0; c < static_cast<CopyId>(num_copies); ++c) copies_of_[at[best_.copies[c].value]++] = c;
}

// The most memory during runs [first, end).
Bytes Evictor::highest(RunId first, RunId end) const {
  Bytes most = 0;
  while (first < end) {
    const bool whole = first % kBlock == 0 && first + kBlock <= end;
    most = std::max(most, whole ? blocks_[first / kBlock] : best_.live[first]);
    first += whole ? kBlock : 1;
  }
  return most;
}

// Values that lie idle at the peak, most bytes freed per second first.
void Evictor::find_candidates() {
  candidates_.clear();
  Decision decision;
  if (taste_.spread > 0) {
    above_.assign(1, 0.0);
    for (const Bytes live : best_.live)
      above_.push_back(above_.back() + static_cast<double>(std::max<Bytes>(0, live - taste_.level)));
  }
  for (CopyId c = 0; c < static_cast<CopyId>(best_.copies.size()); ++c) {
    const auto& copy = best_.copies[c];
    const bool idle = copy.made >= 0 && copy.buffer >= 0 && copy.made < peak_ && previous_[c] < peak_ && next_[c] > peak_ &&
                      next_[c] < best_.num_runs();
    if (!idle || graph_.bytes(values_.tensor[copy.value]) == 0 || tabu_.contains(key(c))) continue;
    Bytes freed = 0;
    double seconds = 0;
    decision.clear();
    if (!estimate(c, decision, freed, seconds) || freed <= 0) continue;
    candidates_.push_back({weight(c) * static_cast<double>(freed) / std::max(seconds, kFree), c, freed});
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.copy < b.copy;
  });
}

// Whether the op that makes a copy need not run before the peak at all once the copy is dropped.
bool Evictor::moves(CopyId copy) const {
  const RunId made = best_.copies[copy].made;
  for (const CopyId c : best_.makes_of(made)) {
    if (previous_[c] != made || values_.output[best_.copies[c].value] != 0) return false;
  }
  return static_cast<Rerun>(rules_.rerun[best_.runs[made].op]) == Rerun::kWhole;
}

// Seconds that making something again adds, as far as is known: an op that runs again behind the peak anyway serves twice.
double Evictor::cost(OpId op) const { return last_again_[op] > peak_ ? 0.0 : rules_.rerun_seconds[op]; }

// The drops that free a copy at the peak, bytes freed there, seconds added. False if what makes it cannot run again.
// Its ancestors that are gone by then are run again as well, or kept: those that are dearest to keep first, as far as that pays.
bool Evictor::estimate(CopyId copy, Decision& decision, Bytes& freed, double& seconds) {
  const auto& runs = best_.runs;
  const ValueId value = best_.copies[copy].value;
  const RunId use = next_[copy];
  const Step needed = runs[use].position;
  const Step step = std::min(runs[peak_].position, static_cast<Step>(needed - 1));
  if (runs[previous_[copy]].position > step || !makes_again(value)) return false;
  const OpId op = values_.producer[value];

  closure_ = {use, step, 0, moves(copy) ? 0 : cost(op), closure_.id + 1};
  closure_of_[op] = closure_.id;
  const double most = effort_.reach * (kClosureFactor * rules_.rerun_seconds[op] + kClosureSeconds);
  decision.push_back({value, step});
  ops_.assign(1, op);
  kept_.clear();
  std::size_t num_drops = 0;
  double best_score = 0;
  for (std::size_t scanned = 0;;) {
    for (; scanned < ops_.size(); ++scanned) {
      for (const auto& list : {values_.rerun_reads[ops_[scanned]], values_.rerun_overwrites[ops_[scanned]]}) {
        for (const ValueId y : list) {
          if (!need(y, decision)) return num_drops > 0;
        }
      }
    }
    const Bytes gain = graph_.bytes(values_.tensor[value]) - closure_.kept_bytes;
    const double score = static_cast<double>(gain) / std::max(closure_.seconds, kFree);
    if (score > best_score) {
      best_score = score;
      num_drops = decision.size();
      freed = gain;
      seconds = closure_.seconds;
    }
    work_ += static_cast<std::int64_t>(kept_.size()) + 1;
    std::size_t dearest = kept_.size();
    double dearest_score = 0;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const double more = cost(values_.producer[kept_[i].value]);
      const double bytes_per_second = static_cast<double>(graph_.bytes(values_.tensor[kept_[i].value])) / std::max(more, kFree);
      if (closure_.seconds + more > most || bytes_per_second <= dearest_score) continue;
      dearest = i;
      dearest_score = bytes_per_second;
    }
    if (dearest == kept_.size() || ops_.size() >= kMaxClosure) break;
    const Drop drop = kept_[dearest];
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(dearest));
    closure_.kept_bytes -= graph_.bytes(values_.tensor[drop.value]);
    run_again(values_.producer[drop.value], cost(values_.producer[drop.value]));
    decision.push_back(drop);
  }
  decision.resize(num_drops);
  return num_drops > 0;
}

bool Evictor::makes_again(ValueId value) const {
  const OpId op = values_.producer[value];
  if (op == kNoOp) return false;
  const auto makes = values_.rerun_makes[op];
  return std::find(makes.begin(), makes.end(), value) != makes.end();
}

void Evictor::run_again(OpId op, double seconds) {
  if (closure_of_[op] == closure_.id) return;
  closure_of_[op] = closure_.id;
  closure_.seconds += seconds;
  ops_.push_back(op);
}

// Makes a value available where the closure needs it: it is there, or runs again, or stays (kept_) for now. False if it cannot be.
bool Evictor::need(ValueId y, Decision& decision) {
  const RunId use = closure_.use;
  CopyId copy = -1, later = -1;  // the last one before the run, the first one after
  for (auto i = copies_offset_[y + 1]; copy < 0 && i-- > copies_offset_[y];) {
    const auto& c = best_.copies[copies_of_[i]];
    if (c.made >= 0 && best_.runs[c.made].dead) continue;
    (c.made < use ? copy : later) = copies_of_[i];
  }
  if (copy < 0) return false;
  const auto& c = best_.copies[copy];
  const OpId op = values_.producer[y];
  const Step position = best_.runs[use].position;
  if (c.made >= 0 && c.last_use < use && drops_.between(y, best_.runs[c.made].position, position)) {
    if (!makes_again(y)) return false;
    const bool shared = later >= 0 && !drops_.between(y, position, best_.runs[best_.copies[later].made].position);
    run_again(op, shared ? 0.0 : cost(op));  // an existing later run only moves here
    return true;
  }
  if (c.consumed && c.last_use < use) {  // overwritten
    if (makes_again(y)) run_again(op, cost(op));
    return makes_again(y);
  }
  const bool on_the_way = op != kNoOp && closure_of_[op] == closure_.id;
  if (c.made < 0 || c.last_use >= use || on_the_way) return true;

  const Bytes bytes = graph_.bytes(values_.tensor[y]);
  const Step last = std::max(best_.runs[c.last_use].position, closure_.step);
  const bool again = makes_again(y) && last < best_.runs[use].position;
  if (c.last_use > peak_) {  // it lives at the peak anyway: is there room until it is needed?
    if (again && highest(c.last_use + 1, use + 1) + bytes > best_.peak) {
      run_again(op, cost(op));
      decision.push_back({y, last});
    }
    return true;
  }
  const auto same = [&](const Drop& drop) { return drop.value == y; };
  if (bytes == 0 || std::any_of(kept_.begin(), kept_.end(), same)) return true;
  closure_.kept_bytes += bytes;
  if (again) kept_.push_back({y, last});
  return true;
}

Rewritten Evictor::rewritten() {
  rewriter_.build(drops_, best_);  // the last build may have been a refused one
  return rewriter_.graph(best_);
}

bool Evictor::reset(std::vector<Decision> decisions) {
  for (const Decision& decision : decisions_) {
    for (const Drop& drop : decision) drops_.remove(drop);
  }
  decisions_ = std::move(decisions);
  for (const Decision& decision : decisions_) {
    for (const Drop& drop : decision) drops_.add(drop);
  }
  tabu_.clear();
  if (rewriter_.build(drops_, best_)) return true;
  reset({});
  return false;
}

void Evictor::set_absent(std::vector<Bytes> absent) {
  rewriter_.set_absent(std::move(absent));
  tabu_.clear();
  rewriter_.build(drops_, best_);
}

void Evictor::set_taste(const Taste& taste) {
  taste_ = taste;
  random_.seed(taste.seed);
}

double Evictor::weight(CopyId copy) {
  double weight = 1;
  if (taste_.noise > 0) weight += taste_.noise * static_cast<double>(random_() >> 11) * 0x1p-53;
  if (taste_.spread > 0 && above_.back() > 0) {
    weight *= 1 + taste_.spread * (above_[next_[copy]] - above_[previous_[copy] + 1]) / above_.back();
  }
  return weight;
}

bool Evictor::take_back(std::span<const Drop> drops, Bytes peak) {
  for (const Drop& drop : drops) drops_.remove(drop);
  if (rewriter_.build(drops_, trial_) && trial_.peak <= peak && trial_.added_seconds <= best_.added_seconds) {
    std::swap(best_, trial_);
    return true;
  }
  for (const Drop& drop : drops) drops_.add(drop);
  return false;
}

void Evictor::reverse(Bytes peak, Control& control) {
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
    if (take_back(decision, peak)) {
      decision.clear();
      continue;
    }
    for (std::size_t k = decision.size(); decision.size() > 1 && k-- > 1;) {
      const Drop drop = decision[k];
      control.spend(best_.num_runs());
      if (take_back({&drop, 1}, peak)) decision.erase(decision.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  std::erase_if(decisions_, [](const Decision& decision) { return decision.empty(); });
  tabu_.clear();
}

}  // namespace olla
