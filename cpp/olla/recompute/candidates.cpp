#include "olla/recompute/candidates.hpp"

#include <algorithm>

#include "olla/base/hash.hpp"

namespace olla {
namespace {

// Limits (seconds, then ops) on rerunning the ancestors of a dropped value; beyond them, its inputs are kept.
constexpr double kClosureFactor = 10.0, kClosureSeconds = 20e-6;
constexpr std::size_t kMaxClosure = 200;
constexpr RunId kBlock = 64;

}  // namespace

DropCandidates::DropCandidates(const Graph& graph, const Values& values, const Rules& rules, const DropSet& drops)
    : graph_(graph),
      values_(values),
      rules_(rules),
      drops_(drops),
      closure_of_(graph.num_ops(), 0),
      is_kept_(values.num_values()) {}

bool DropCandidates::is_candidate(CopyId c) const {
  const auto& copy = rewrite_->copies[c];
  return copy.made >= 0 && copy.buffer >= 0 && copy.made < peak_ && previous_[c] < peak_ && next_[c] > peak_ &&
         next_[c] < rewrite_->num_runs() && graph_.bytes(values_.tensor[copy.value]) > 0;
}

// Last use up to the peak and first use from it on, of every copy; -1 and num_runs where there is none.
void DropCandidates::look(const Rewrite& rewrite, RunId peak) {
  rewrite_ = &rewrite;
  peak_ = peak;
  const auto num_copies = rewrite_->copies.size();
  previous_.assign(num_copies, -1);
  next_.assign(num_copies, rewrite_->num_runs());
  last_rerun_.assign(graph_.num_ops(), -1);
  for (const RunId run : rewrite_->alive()) {
    if (rewrite_->runs[run].rerun) last_rerun_[rewrite_->runs[run].op] = run;
    for (const CopyId c : rewrite_->reads[run]) {
      if (run >= peak_) next_[c] = std::min(next_[c], run);
      if (run <= peak_) previous_[c] = run;
    }
    if (run > peak_) continue;
    for (const CopyId c : rewrite_->makes[run]) previous_[c] = run;
  }
  blocks_.assign(rewrite_->live.size() / kBlock + 1, 0);
  for (std::size_t run = 0; run < rewrite_->live.size(); ++run) {
    blocks_[run / kBlock] = std::max(blocks_[run / kBlock], rewrite_->live[run]);
  }
  copies_offset_.assign(values_.num_values() + 1, 0);
  for (const auto& copy : rewrite_->copies) ++copies_offset_[copy.value + 1];
  for (ValueId x = 0; x < values_.num_values(); ++x) copies_offset_[x + 1] += copies_offset_[x];
  copies_of_.resize(num_copies);
  auto at = copies_offset_;
  for (CopyId c = 0; c < static_cast<CopyId>(num_copies); ++c) copies_of_[at[rewrite_->copies[c].value]++] = c;
}

// The most memory during runs [first, end).
Bytes DropCandidates::highest(RunId first, RunId end) const {
  Bytes most = 0;
  while (first < end) {
    const bool whole = first % kBlock == 0 && first + kBlock <= end;
    most = std::max(most, whole ? blocks_[first / kBlock] : rewrite_->live[first]);
    first += whole ? kBlock : 1;
  }
  return most;
}

// Identifies a gap of a value by its base steps, which changes elsewhere leave as they are.
std::uint64_t DropCandidates::key(CopyId copy) const {
  const auto position = [&](RunId run) { return static_cast<std::uint64_t>(run < 0 ? Step{0} : rewrite_->runs[run].position); };
  const auto value = static_cast<std::uint64_t>(rewrite_->copies[copy].value);
  return mixed(value + 1) ^ (position(previous_[copy]) << 32 | position(next_[copy]));
}

// Whether the op that makes a copy need not run before the peak at all once the copy is dropped.
bool DropCandidates::moves(CopyId copy) const {
  const RunId made = rewrite_->copies[copy].made;
  for (const CopyId c : rewrite_->makes[made]) {
    if (previous_[c] != made || values_.output[rewrite_->copies[c].value] != 0) return false;
  }
  return static_cast<Rerun>(rules_.rerun[rewrite_->runs[made].op]) == Rerun::kWhole;
}

// Estimated seconds that rerunning an op adds: none if it is recomputed after the peak anyway.
double DropCandidates::cost(OpId op) const { return last_rerun_[op] > peak_ ? 0.0 : rules_.rerun_seconds[op]; }

// The drops that free a copy at the peak, bytes freed there, seconds added. False if it cannot be recomputed. Ancestors freed by
// then are kept or rerun: first all are kept, then those with most bytes per second rerun; the best ratio wins.
bool DropCandidates::estimate(CopyId copy, double reach, Decision& decision, Bytes& freed, double& seconds) {
  const auto& runs = rewrite_->runs;
  const ValueId value = rewrite_->copies[copy].value;
  const RunId use = next_[copy];
  const Step needed = runs[use].position;
  const Step step = std::min(runs[peak_].position, static_cast<Step>(needed - 1));
  if (runs[previous_[copy]].position > step || !values_.remade(value)) return false;
  const OpId op = values_.producer[value];

  closure_ = {use, step, 0, moves(copy) ? 0 : cost(op), closure_.id + 1};
  closure_of_[op] = closure_.id;
  const double most = reach * (kClosureFactor * rules_.rerun_seconds[op] + kClosureSeconds);
  decision.push_back({value, step});
  ops_.assign(1, op);
  kept_.clear();
  is_kept_.clear();
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
    const double score = static_cast<double>(gain) / std::max(closure_.seconds, kFreeSeconds);
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
      const double bytes_per_second =
          static_cast<double>(graph_.bytes(values_.tensor[kept_[i].value])) / std::max(more, kFreeSeconds);
      if (closure_.seconds + more > most || bytes_per_second <= dearest_score) continue;
      dearest = i;
      dearest_score = bytes_per_second;
    }
    if (dearest == kept_.size() || ops_.size() >= kMaxClosure) break;
    const Drop drop = kept_[dearest];
    is_kept_.remove(drop.value);
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(dearest));
    closure_.kept_bytes -= graph_.bytes(values_.tensor[drop.value]);
    add_rerun(values_.producer[drop.value], cost(values_.producer[drop.value]));
    decision.push_back(drop);
  }
  decision.resize(num_drops);
  return num_drops > 0;
}

void DropCandidates::add_rerun(OpId op, double seconds) {
  if (closure_of_[op] == closure_.id) return;
  closure_of_[op] = closure_.id;
  closure_.seconds += seconds;
  ops_.push_back(op);
}

// Makes a value available to the closure: it is live anyway, is made by a rerun, or is kept for now (kept_). False if impossible.
bool DropCandidates::need(ValueId y, Decision& decision) {
  const RunId use = closure_.use;
  CopyId copy = -1, later = -1;  // the last one before the run, the first one after
  for (auto i = copies_offset_[y + 1]; copy < 0 && i-- > copies_offset_[y];) {
    const auto& c = rewrite_->copies[copies_of_[i]];
    if (c.made >= 0 && rewrite_->runs[c.made].dead) continue;
    (c.made < use ? copy : later) = copies_of_[i];
  }
  if (copy < 0) return false;
  const auto& c = rewrite_->copies[copy];
  const OpId op = values_.producer[y];
  const Step position = rewrite_->runs[use].position;
  if (c.made >= 0 && c.last_use < use && drops_.between(y, rewrite_->runs[c.made].position, position)) {
    if (!values_.remade(y)) return false;
    const bool shared = later >= 0 && !drops_.between(y, position, rewrite_->runs[rewrite_->copies[later].made].position);
    add_rerun(op, shared ? 0.0 : cost(op));  // an existing later run only moves here
    return true;
  }
  if (c.consumed && c.last_use < use) {  // overwritten
    if (values_.remade(y)) add_rerun(op, cost(op));
    return values_.remade(y);
  }
  const bool on_the_way = op != kNoOp && closure_of_[op] == closure_.id;
  if (c.made < 0 || c.last_use >= use || on_the_way) return true;

  const Bytes bytes = graph_.bytes(values_.tensor[y]);
  const Step last = std::max(rewrite_->runs[c.last_use].position, closure_.step);
  const bool can_rerun = values_.remade(y) && last < rewrite_->runs[use].position;
  const bool ends_here = !rules_.fusion.empty() && c.last_use == peak_;
  if (c.last_use > peak_ || ends_here) {  // it lives at the peak anyway: is there room until it is needed?
    if (can_rerun && highest(c.last_use + 1, use + 1) + bytes > rewrite_->peak) {
      add_rerun(op, cost(op));
      decision.push_back({y, last});
    }
    return true;
  }
  if (bytes == 0 || is_kept_.has(y)) return true;
  closure_.kept_bytes += bytes;
  if (can_rerun) {
    kept_.push_back({y, last});
    is_kept_.add(y);
  }
  return true;
}

}  // namespace olla
