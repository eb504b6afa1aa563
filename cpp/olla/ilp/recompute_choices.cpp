#include "olla/ilp/recompute_choices.hpp"

#include <algorithm>

#include "olla/base/marks.hpp"

namespace olla {
namespace {

constexpr std::int64_t kUsesPerEntry = 16;  // most of them are no entries: what is read was kept for certain

}  // namespace

RecomputeChoices::RecomputeChoices(const RecomputeSearch& search, const Rewrite& plain, Bytes peak, bool prune,
                                   std::int64_t max_size)
    : runs(search.base().size()),
      rerun_steps(search.base().size()),
      lives(search.values().num_values()),
      around(search.base().size()),
      graph_(search.graph()),
      values_(search.values()),
      rules_(search.rules()),
      base_(search.base()),
      peak_(peak),
      prune_(prune),
      unmovable_(base_.size(), 0) {
  read_base(plain);
  too_large_ = !find_runs(max_size) || !find_lives(max_size);
}

void RecomputeChoices::read_base(const Rewrite& plain) {
  const auto num_ops = static_cast<Step>(base_.size());
  step_of.assign(num_ops, 0);
  overwritten.assign(values_.num_values(), num_ops);
  accesses.resize(values_.num_values());
  for (const OpId u : graph_.data().after.item) unmovable_[u] = 1;
  num_above_.assign(num_ops + 1, 0);
  for (Step s = 0; s < num_ops; ++s) {
    step_of[base_[s]] = s;
    num_above_[s + 1] = num_above_[s] + (plain.live[plain.own_run[base_[s]]] > peak_ ? 1 : 0);
    for (const auto& list : {values_.reads[base_[s]], values_.overwrites[base_[s]], values_.makes[base_[s]]}) {
      for (const ValueId x : list) {
        if (accesses[x].empty() || accesses[x].back() != s) accesses[x].push_back(s);
      }
    }
    for (const ValueId x : values_.overwrites[base_[s]]) overwritten[x] = s;
  }
}

bool RecomputeChoices::find_runs(std::int64_t max_size) {
  Marks reruns(static_cast<OpId>(base_.size()));  // at the step
  std::int64_t size = 0;                          // uses of what is recomputed
  for (Step s = 0; s < static_cast<Step>(base_.size()); ++s) {
    auto& here = runs[s];
    here.push_back({base_[s], false, {}});
    reruns.clear();
    for (std::size_t i = 0; i < here.size(); ++i) {
      const Run run = here[i];
      if (run.rerun) size += std::ssize(reads(run)) + std::ssize(overwrites(run)) + 1;
      if (size > kUsesPerEntry * max_size) return false;
      for (const auto& list : {reads(run), overwrites(run)}) {
        for (const ValueId x : list) {
          if (!may_be_missing(x, s) || !reruns.add(values_.producer[x])) continue;
          here.push_back({values_.producer[x], true, {}});
          rerun_steps[values_.producer[x]].push_back(s);
        }
      }
    }
  }
  return true;
}

bool RecomputeChoices::find_lives(std::int64_t max_size) {
  const auto num_ops = static_cast<Step>(base_.size());
  auto touch = [&](ValueId x, Step s) {
    const OpId u = values_.producer[x];
    const bool moves = u != kNoOp && !rerun_steps[u].empty();  // then even a value without bytes is not always there
    if (!graph_.planned(values_.tensor[x]) || (bytes(x) == 0 && !moves)) return;
    auto& steps = lives[x].steps;
    if (steps.empty() || steps.back() != s) steps.push_back(s);
  };
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.producer[x] == kNoOp) touch(x, -1);
  }
  for (Step s = 0; s < num_ops; ++s) {
    for (const Run& run : runs[s]) {
      for (const auto& list : {reads(run), overwrites(run), makes(run)}) {
        for (const ValueId x : list) touch(x, s);
      }
    }
  }
  std::int64_t size = 0;  // of `around`
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.output[x] != 0) touch(x, num_ops);
    const auto& steps = lives[x].steps;
    if (steps.empty()) continue;
    size += std::max(steps.back() - steps.front() - 1, 0);
    if (size > max_size) return false;
    for (Step s = steps.front() + 1; s < steps.back(); ++s) around[s].push_back(x);
  }
  return true;
}

bool RecomputeChoices::remade(ValueId x) const {
  const OpId u = values_.producer[x];
  return u != kNoOp && values_.rerun_overwrites[u].empty() && values_.remade(x);
}

bool RecomputeChoices::may_be_missing(ValueId x, Step step) const {
  if (!remade(x) || step_of[values_.producer[x]] >= step) return false;
  if (overwritten[x] < step) return true;
  if (bytes(x) == 0) return false;
  if (!prune_) return true;
  const auto next = std::lower_bound(accesses[x].begin(), accesses[x].end(), step);
  return num_above_[step] > num_above_[*(next - 1) + 1];
}

// As in rewrite.cpp.
bool RecomputeChoices::movable(OpId v) const {
  if (static_cast<Rerun>(rules_.rerun[v]) != Rerun::kWhole || unmovable_[v] != 0 || rerun_steps[v].empty()) return false;
  const auto made = values_.makes[v];
  return std::any_of(made.begin(), made.end(), [&](ValueId x) { return !values_.readers[x].empty(); });
}

const RecomputeChoices::Run* RecomputeChoices::find(OpId op, Step step, bool rerun) const {
  for (const Run& run : runs[step]) {
    if (run.op == op && run.rerun == rerun) return &run;
  }
  return nullptr;
}

}  // namespace olla
