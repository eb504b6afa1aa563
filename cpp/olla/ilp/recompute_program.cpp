#include "olla/ilp/recompute_program.hpp"

#include <algorithm>
#include <numeric>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr double kMostUnits = 1e6;      // sizes beyond are told apart by the simulation only
constexpr double kTimeUnits = 1e3;      // of the time of all ops
constexpr double kSlackSeconds = 1e-9;  // of the time of all ops: sums in another order
constexpr int kMostRows = 64;           // added at once

Step position(const Rewrite& r, RunId run) {
  return run < 0 ? Step{-1} : run >= r.num_runs() ? static_cast<Step>(r.own_run.size()) : r.runs[run].position;
}

}  // namespace

RecomputeProgram::RecomputeProgram(const RecomputeSearch& search, const Rewrite& plain, const Target& target, Bytes most_bytes,
                                   bool prune, std::int64_t max_nonzeros)
    : graph_(search.graph()),
      values_(search.values()),
      rules_(search.rules()),
      base_(search.base()),
      target_(target),
      most_bytes_(most_bytes),
      choices_(search, plain, target.peak, prune, max_nonzeros),
      carried_(base_.size()) {
  unit_ = std::max(1.0, static_cast<double>(most_bytes) / kMostUnits);
  const double seconds = std::accumulate(rules_.seconds.begin(), rules_.seconds.end(), 0.0);
  per_second_ = seconds > 0 ? kTimeUnits / seconds : 1;
  too_large_ = choices_.too_large();
  if (too_large_) return;
  add_runs();
  add_lives();
  for (Step s = 0; s < static_cast<Step>(base_.size()) && !too_large_; ++s) {
    for (const Run& run : choices_.runs[s]) add_dependencies(s, run);
    too_large_ = program_.num_nonzeros() > max_nonzeros;
  }
  for (Step s = 0; s < static_cast<Step>(base_.size()) && !too_large_; ++s) {
    add_memory(s, choices_.runs[s].front());
    too_large_ = program_.num_nonzeros() > max_nonzeros;
  }
}

void RecomputeProgram::add_runs() {
  const double time = target_.least_time ? per_second_ : 0;
  Sum added;
  for (auto& runs : choices_.runs) {
    for (Run& run : runs) {
      const double seconds = run.rerun ? rules_.rerun_seconds[run.op] : rules_.seconds[run.op];
      run.runs = {-1, 1};
      if (!run.rerun && !choices_.movable(run.op)) continue;
      run.runs = {program_.add_column(time * seconds, 0, 1, true), 0};
      added.add(run.runs, per_second_ * seconds);
      if (!run.rerun) offset_seconds_ -= seconds;
    }
  }
  if (target_.least_time && target_.added_seconds > 0) {
    add_row(per_second_ * (target_.added_seconds - offset_seconds_) - kTimeUnits * kSlackSeconds, Program::kInfinity, added);
  }
  if (!target_.least_time) {
    peak_ = program_.add_column(1, static_cast<double>(target_.peak) / unit_, static_cast<double>(most_bytes_) / unit_, false);
    add_row(-Program::kInfinity, per_second_ * (target_.added_seconds - offset_seconds_) + kTimeUnits * kSlackSeconds, added);
  }
  for (Step s = 0; s < static_cast<Step>(base_.size()); ++s) {  // (e)
    const Run& own = choices_.runs[s].front();
    if (own.runs.column < 0) continue;
    Sum sum{{own.runs, 1}};
    for (const Step step : choices_.rerun_steps[own.op]) sum.add(choices_.find(own.op, step, true)->runs, 1);
    add_row(1, Program::kInfinity, sum);
  }
}

void RecomputeProgram::add_lives() {
  const auto num_ops = static_cast<Step>(base_.size());
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    auto& [steps, kept] = choices_.lives[x];
    const OpId u = values_.producer[x];
    Step certain = -1;  // kept up to here: nothing makes it again
    if (u == kNoOp || (choices_.rerun_steps[u].empty() && !choices_.movable(u))) {
      for (const Step s : choices_.accesses[x]) {
        if (choices_.runs[s].front().runs.column < 0) certain = s;
      }
      if (values_.output[x] != 0) certain = num_ops;
    }
    for (std::size_t j = 0; j + 1 < steps.size(); ++j) {
      if (steps[j] == choices_.overwritten[x]) {
        kept.push_back({-1, 0});
      } else if (steps[j + 1] <= certain || (values_.output[x] != 0 && steps[j + 1] == num_ops)) {
        kept.push_back({-1, 1});
      } else {
        kept.push_back({program_.add_column(0, 0, 1, true), 0});
      }
      if (steps[j] < 0) continue;
      Sum sum{{kept[j], -1}};  // (b)
      if (j > 0) sum.add(kept[j - 1], 1);
      if (u != kNoOp && choices_.step_of[u] == steps[j]) sum.add(choices_.runs[steps[j]].front().runs, 1);
      if (const Run* maker = choices_.find_maker(x, steps[j])) sum.add(maker->runs, 1);
      add_row(0, Program::kInfinity, sum);
    }
  }
}

void RecomputeProgram::add_dependencies(Step s, const Run& run) {
  for (const auto& list : {choices_.reads(run), choices_.overwrites(run)}) {
    for (const ValueId x : list) {  // (a)
      Sum sum{{run.runs, -1}, {kept_before(x, s), 1}};
      if (const Run* maker = choices_.find_maker(x, s)) sum.add(maker->runs, 1);
      add_row(0, Program::kInfinity, sum);
    }
  }
  if (!run.rerun) return;
  Sum sum{{run.runs, -1}};  // (c)
  for (const ValueId x : choices_.makes(run)) sum.add(needed(x, s), 1);
  add_row(0, Program::kInfinity, sum);
}

// The column N: value x is read at step s, but was not kept up to it.
Value RecomputeProgram::needed(ValueId x, Step s) {
  std::vector<Value> readers;
  for (const Run& run : choices_.runs[s]) {
    if (choices_.uses(run, x)) readers.push_back(run.runs);
  }
  const Value before = kept_before(x, s);
  if (readers.empty() || (before.column < 0 && before.constant > 0)) return {};  // never
  const Value result = derive([=](Answer answer) {
    double most = 0;
    for (const Value& reader : readers) most = std::max(most, value(reader, answer));
    return std::min(most, 1 - value(before, answer));
  });
  Sum read{{result, -1}};
  for (const Value& reader : readers) read.add(reader, 1);
  add_row(0, Program::kInfinity, read);
  add_row(-Program::kInfinity, 1, {{result, 1}, {before, 1}});
  return result;
}

Value RecomputeProgram::derive(std::function<double(Answer)> value) {
  const Column column = program_.add_column(0, 0, 1, false);
  derived_.push_back({column, std::move(value)});
  return {column, 0};
}

Value RecomputeProgram::kept_before(ValueId x, Step step) const {
  const auto& [steps, kept] = choices_.lives[x];
  if (steps.empty()) return {-1, choices_.overwritten[x] < step ? 0.0 : 1.0};
  const auto at = std::lower_bound(steps.begin(), steps.end(), step) - steps.begin();
  return at > 0 ? kept[at - 1] : Value{};
}

Value RecomputeProgram::kept_after(ValueId x, Step step) const {
  const auto& [steps, kept] = choices_.lives[x];
  const auto after = std::upper_bound(steps.begin(), steps.end(), step) - steps.begin();
  return after > 0 && after < static_cast<std::ptrdiff_t>(steps.size()) ? kept[after - 1] : Value{};
}

// C[x,s]: value x is in memory throughout the step: kept after it, and not made only there.
Value RecomputeProgram::carried(ValueId x, Step step) {
  const Value after = kept_after(x, step);
  const Run* maker = choices_.find_maker(x, step);
  if (maker == nullptr || (after.column < 0 && after.constant == 0)) return after;
  for (const auto& [value, literal] : carried_[step]) {
    if (value == x) return literal;
  }
  const Value made = maker->runs;
  const Value literal = derive([=](Answer answer) { return value(after, answer) - value(made, answer); });
  add_row(0, Program::kInfinity, {{literal, 1}, {after, -1}, {made, 1}});
  carried_[step].emplace_back(x, literal);
  return literal;
}

void RecomputeProgram::add_memory(Step s, const Run& run) {  // (f)
  Sum sum;
  sum.constant = sum.most = static_cast<double>(graph_.resident_bytes() + graph_.workspace(run.op)) / unit_;
  add_touched(run, sum);
  add_overlap(s, run, sum);
  const Run& own = choices_.runs[s].front();
  for (const ValueId x : choices_.around[s]) {
    if (choices_.uses(run, x) || contains(choices_.makes(run), x)) continue;
    const bool waits = run.rerun && choices_.uses(own, x);  // for the step's own op
    sum.add(waits ? kept_before(x, s) : carried(x, s), static_cast<double>(choices_.bytes(x)) / unit_);
  }
  const double least = static_cast<double>(target_.peak) / unit_;
  if (sum.most <= least) return;
  double to = target_.least_time ? least : 0;
  if (run.runs.column >= 0) {
    const double slack = sum.most - least;
    to += slack;
    sum.add(run.runs, slack);
  }
  if (!target_.least_time) sum.add({peak_, 0}, -1);
  add_row(-Program::kInfinity, to, sum);
}

// The values that the op itself reads and makes; those it overwrites count once.
void RecomputeProgram::add_touched(const Run& run, Sum& sum) {
  const auto over = choices_.overwrites(run);
  const auto made = choices_.makes(run);
  auto add = [&](ValueId x) {
    if (graph_.planned(values_.tensor[x])) sum.add({-1, 1}, static_cast<double>(choices_.bytes(x)) / unit_);
  };
  for (const ValueId x : choices_.reads(run)) {
    if (!contains(over, x)) add(x);
  }
  for (const ValueId x : over) add(x);
  for (std::size_t i = 0; i + over.size() < made.size(); ++i) add(made[i]);
}

void RecomputeProgram::add_overlap(Step s, const Run& run, Sum& sum) {
  const auto made = choices_.makes(run);
  if (rules_.in_place[run.op] == 0 || made.size() != 1 || !choices_.overwrites(run).empty() || choices_.bytes(made[0]) == 0) return;
  const double size = static_cast<double>(choices_.bytes(made[0])) / unit_;
  std::vector<Value> kept;
  for (const ValueId x : choices_.reads(run)) {
    if (graph_.producer(values_.tensor[x]) != kNoOp && choices_.bytes(x) == choices_.bytes(made[0]))
      kept.push_back(kept_after(x, s));
  }
  const auto dies = [](const Value& literal) { return literal.column < 0 && literal.constant == 0; };
  if (kept.empty()) return;
  if (std::any_of(kept.begin(), kept.end(), dies)) {
    sum.add({-1, 1}, -size);
  } else if (kept.size() == 1) {
    sum.add({-1, 1}, -size);
    sum.add(kept[0], size);
  } else {
    const Value overlap = derive([=](Answer answer) {
      double num_dying = 0;
      for (const Value& literal : kept) num_dying += 1 - value(literal, answer);
      return num_dying;
    });
    Sum row{{overlap, 1}};
    for (const Value& literal : kept) row.add(literal, 1);
    add_row(-Program::kInfinity, static_cast<double>(kept.size()), row);
    sum.add(overlap, -size);
  }
}

void RecomputeProgram::add_row(double from, double to, const Sum& sum) {
  const std::vector<Term> merged = sum.merged();
  double least = sum.constant, most = sum.constant;
  for (const Term& term : merged) {
    least += std::min(0.0, term.value * program_.upper[term.column]);
    most += std::max(0.0, term.value * program_.upper[term.column]);
  }
  if (least >= from && most <= to) return;
  impossible_ = impossible_ || least > to || most < from;
  program_.add_row(from - sum.constant, to - sum.constant, merged);
}

std::vector<Drop> RecomputeProgram::decode(std::span<const double> answer) const {
  const auto is_one = [&](const Value& literal) { return value(literal, answer) > 0.5; };
  std::vector<Step> moved;  // steps whose op does not run there: the rewriter makes its inputs all the same, for nobody
  for (Step s = 0; s < static_cast<Step>(base_.size()); ++s) {
    if (!is_one(choices_.runs[s].front().runs)) moved.push_back(s);
  }
  std::vector<Drop> drops;
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.producer[x] == kNoOp) continue;
    const auto& [steps, kept] = choices_.lives[x];
    for (std::size_t j = 0; j < kept.size(); ++j) {
      if (is_one(kept[j])) continue;
      drops.push_back({x, steps[j]});
      const auto from = std::upper_bound(moved.begin(), moved.end(), steps[j]);
      for (auto at = from; at != moved.end() && *at < steps[j + 1]; ++at) drops.push_back({x, *at});
    }
  }
  return drops;
}

std::vector<double> RecomputeProgram::encode(const Rewrite& r) const {
  std::vector<double> answer(program_.num_columns(), 0.0);
  for (const auto& run : r.runs) {
    if (run.dead) continue;
    const Run* found = choices_.find(run.op, run.position, run.rerun);
    if (found == nullptr) return {};
    if (found->runs.column >= 0) answer[found->runs.column] = 1;
  }
  for (const auto& copy : r.copies) {
    if (copy.buffer < 0) continue;
    const auto& [steps, kept] = choices_.lives[copy.value];
    const Step made = position(r, copy.made), last = position(r, copy.last_use);
    for (std::size_t j = 0; j < kept.size(); ++j) {
      if (steps[j] < made || steps[j + 1] > last) continue;
      if (kept[j].column >= 0) answer[kept[j].column] = 1;
    }
  }
  for (const Derived& d : derived_) answer[d.column] = std::clamp(d.value(answer), 0.0, 1.0);
  if (peak_ >= 0) answer[peak_] = static_cast<double>(r.peak) / unit_;
  return answer;
}

void RecomputeProgram::cut_off(const Rewrite& r, Bytes limit) {
  std::vector<RunId> above;
  for (RunId run = 0; run < r.num_runs(); ++run) {
    if (!r.runs[run].dead && r.live[run] > limit) above.push_back(run);
  }
  std::sort(above.begin(), above.end(), [&](RunId a, RunId b) { return r.live[a] != r.live[b] ? r.live[a] > r.live[b] : a < b; });
  if (above.size() > kMostRows) above.resize(kMostRows);
  for (const RunId run : above) {
    const auto& [op, step, rerun, replay, dead, in_place] = r.runs[run];
    const std::pair<Step, OpId> key(step, op);
    const Run* found = choices_.find(op, step, rerun);
    if (rerun && found != nullptr && std::find(bounded_.begin(), bounded_.end(), key) == bounded_.end()) {
      add_memory(step, *found);
      bounded_.push_back(key);
    }
    rule_out(r, run, limit);
  }
}

// Adds a row: if the same ops run at the step, and the same values are kept up to and past it, this run needs as much memory.
void RecomputeProgram::rule_out(const Rewrite& r, RunId run, Bytes limit) {
  const Step step = r.runs[run].position;
  std::vector<Column> ones;
  const auto needs = [&](const Value& literal) {
    if (literal.column >= 0) ones.push_back(literal.column);
  };
  for (RunId at = 0; at < r.num_runs(); ++at) {
    if (r.runs[at].position != step || r.runs[at].dead) continue;
    if (const Run* found = choices_.find(r.runs[at].op, step, r.runs[at].rerun)) needs(found->runs);
    for (const CopyId c : r.reads[at]) {
      if (position(r, r.copies[c].made) < step) needs(kept_before(r.copies[c].value, step));
    }
  }
  std::vector<ValueId> past;  // kept past the step, and in memory during the run
  for (const auto& copy : r.copies) {
    if (copy.buffer < 0 || copy.made > run || position(r, copy.last_use) <= step || choices_.lives[copy.value].steps.empty())
      continue;
    past.push_back(copy.value);
  }
  std::sort(past.begin(), past.end(), [&](ValueId a, ValueId b) {
    return choices_.bytes(a) != choices_.bytes(b) ? choices_.bytes(a) < choices_.bytes(b) : a < b;
  });
  Bytes live = r.live[run];
  for (const ValueId x : past) {
    if (target_.least_time && live - choices_.bytes(x) > limit) {  // above the limit even without it
      live -= choices_.bytes(x);
    } else {
      needs(kept_after(x, step));
    }
  }
  sort_unique(ones);
  const auto num = static_cast<double>(ones.size());
  Sum sum;
  if (target_.least_time) {
    for (const Column column : ones) sum.add({column, 0}, 1);
    add_row(-Program::kInfinity, num - 1, sum);
    return;
  }
  const double more = static_cast<double>(live - target_.peak) / unit_;
  sum.add({peak_, 0}, 1);
  for (const Column column : ones) sum.add({column, 0}, -more);
  add_row(static_cast<double>(live) / unit_ - more * num, Program::kInfinity, sum);
}

}  // namespace olla
