#include "olla/evict.hpp"

#include <algorithm>

namespace olla {
namespace {

// How far the ancestors of a dropped value are run again too; beyond, what it needs is kept.
constexpr double kClosureFactor = 10.0, kClosureSeconds = 20e-6;
constexpr double kSure = 0.5;   // share of an estimate of seconds that an attempt is certain to add
constexpr double kFree = 1e-9;  // seconds of a step that costs nothing, so that scores stay finite

}  // namespace

Evictor::Evictor(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base)
    : graph_(graph), values_(values), rules_(rules), rewriter_(graph, values, rules, base), drops_(values.num_values()) {
  rewriter_.build(drops_, best_);
  curve_.push_back({best_.peak, best_.added_seconds});
}

void Evictor::run(const EvictLimits& limits, Control& control) {
  Decision decision;
  curve_.assign(1, {best_.peak, best_.added_seconds});
  bool progress = true;  // since the refusals were last forgotten
  while (best_.peak > limits.peak && best_.peak_run >= 0 && !control.stop(best_.peak, limits.peak)) {
    peak_ = best_.peak_run;
    find_uses();
    find_candidates();
    bool found = false;
    for (const Candidate& candidate : candidates_) {
      Bytes freed = 0;
      double seconds = 0;
      decision.clear();
      estimate(candidate.copy, decision, freed, seconds);
      if (best_.added_seconds + kSure * seconds > limits.added_seconds) continue;
      if (attempt(decision, limits.added_seconds)) {
        found = true;
        break;
      }
      tabu_.insert(key(candidate.copy));
    }
    if (found) {
      curve_.push_back({best_.peak, best_.added_seconds});
      progress = true;
      continue;
    }
    if (!progress || tabu_.empty()) return;
    tabu_.clear();
    progress = false;
  }
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
  const auto& [op, position, again, dead, in_place] = best_.runs[peak_];
  bool better = rewriter_.build(drops_, trial_) && trial_.peak <= best_.peak && trial_.added_seconds <= most_seconds;
  if (better) {
    const auto same = [&](const Rewrite::Run& run) { return run.op == op && run.position == position && !run.dead; };
    const auto at = std::lower_bound(trial_.runs.begin(), trial_.runs.end(), position,
                                     [](const Rewrite::Run& run, Step p) { return run.position < p; });
    const auto found = std::find_if(at, trial_.runs.end(), same);
    better = found == trial_.runs.end() || trial_.live[found - trial_.runs.begin()] < best_.peak;
  }
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
  copies_offset_.assign(values_.num_values() + 1, 0);
  for (const auto& copy : best_.copies) ++copies_offset_[copy.value + 1];
  for (ValueId x = 0; x < values_.num_values(); ++x) copies_offset_[x + 1] += copies_offset_[x];
  copies_of_.resize(num_copies);
  auto at = copies_offset_;
  for (CopyId c = 0; c < static_cast<CopyId>(num_copies); ++c) copies_of_[at[best_.copies[c].value]++] = c;
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

  closure_ = {use, step, 0, moves(copy) ? 0 : cost(op)};
  const double most = kClosureFactor * rules_.rerun_seconds[op] + kClosureSeconds;
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
    std::size_t dearest = kept_.size();
    double dearest_score = 0;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const double more = cost(values_.producer[kept_[i].value]);
      const double bytes_per_second = static_cast<double>(graph_.bytes(values_.tensor[kept_[i].value])) / std::max(more, kFree);
      if (closure_.seconds + more > most || bytes_per_second <= dearest_score) continue;
      dearest = i;
      dearest_score = bytes_per_second;
    }
    if (dearest == kept_.size()) break;
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
  if (std::find(ops_.begin(), ops_.end(), op) != ops_.end()) return;
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
  const bool on_the_way = op != kNoOp && std::find(ops_.begin(), ops_.end(), op) != ops_.end();
  if (c.made < 0 || c.last_use >= use || on_the_way) return true;

  const Bytes bytes = graph_.bytes(values_.tensor[y]);
  const Step last = std::max(best_.runs[c.last_use].position, closure_.step);
  const bool again = makes_again(y) && last < best_.runs[use].position;
  if (c.last_use > peak_ || (!rules_.fusion.empty() && c.last_use == peak_)) {  // it lives at the peak anyway: is there room until it is needed?
    const auto highest = std::max_element(best_.live.begin() + c.last_use + 1, best_.live.begin() + use + 1);
    if (again && *highest + bytes > best_.peak) {
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
    if (take_back(decision, peak)) {
      decision.clear();
      continue;
    }
    for (std::size_t k = decision.size(); decision.size() > 1 && k-- > 1;) {
      const Drop drop = decision[k];
      if (take_back({&drop, 1}, peak)) decision.erase(decision.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  std::erase_if(decisions_, [](const Decision& decision) { return decision.empty(); });
  tabu_.clear();
}

}  // namespace olla
