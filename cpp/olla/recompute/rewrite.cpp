#include "olla/recompute/rewrite.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

// A fused rerun serves readers within this many base steps; a later reader gets another rerun, as keeping the inputs that long
// costs more.
constexpr Step kFusedReach = 32;
// A compiler stops fusing a value that would read more buffers than this; the second limit is for values with several readers.
constexpr int kMaxInputs = 8, kMaxSharedInputs = 4;

}  // namespace

bool DropSet::add(const Drop& drop) {
  auto& steps = steps_[drop.value];
  const auto at = std::lower_bound(steps.begin(), steps.end(), drop.step);
  if (at != steps.end() && *at == drop.step) return false;
  steps.insert(at, drop.step);
  return true;
}

bool DropSet::remove(const Drop& drop) {
  auto& steps = steps_[drop.value];
  const auto at = std::lower_bound(steps.begin(), steps.end(), drop.step);
  if (at == steps.end() || *at != drop.step) return false;
  steps.erase(at);
  return true;
}

bool DropSet::add(std::span<const Drop> drops) {
  const auto there = std::ranges::find_if_not(drops, [&](const Drop& drop) { return add(drop); });
  if (there == drops.end()) return true;
  remove({drops.begin(), there});
  return false;
}

bool DropSet::between(ValueId value, Step made, Step read) const {
  const auto& steps = steps_[value];
  const auto at = std::lower_bound(steps.begin(), steps.end(), made);
  return at != steps.end() && *at < read;
}

Rewriter::Rewriter(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base)
    : graph_(graph), values_(values), rules_(rules), base_(base), unmovable_(base.size(), 0) {
  for (const OpId u : graph.data().after.item) unmovable_[u] = 1;
}

bool Rewriter::build(const DropSet& drops, Rewrite& result) {
  if (!walk(drops, result)) return false;
  remove_dead_runs(result);
  find_last_uses(result);
  fuse(result);
  place(result);
  measure(result);
  return true;
}

Fusion Rewriter::fusion(OpId v) const { return rules_.fusion.empty() ? Fusion::kNone : static_cast<Fusion>(rules_.fusion[v]); }

CopyId Rewriter::new_copy(ValueId value, RunId made, Rewrite& r) {
  r.copies.push_back({value, made, made, -1, false, false});
  return static_cast<CopyId>(r.copies.size()) - 1;
}

bool Rewriter::usable(CopyId copy, Step position, const DropSet& drops, const Rewrite& r) const {
  if (copy < 0 || r.copies[copy].consumed) return false;
  const RunId made = r.copies[copy].made;
  if (made < 0) return true;
  const auto& run = r.runs[made];
  if (!rules_.unsaved.empty() && rules_.unsaved[run.op] != 0 && run.position < rules_.split && position >= rules_.split)
    return false;
  if (run.rerun && fusion(run.op) == Fusion::kPointwise && position - run.position > kFusedReach) return false;
  return !drops.between(r.copies[copy].value, run.position, position);
}

bool Rewriter::walk(const DropSet& drops, Rewrite& r) {
  r.runs.clear(), r.copies.clear(), r.buffers.clear();
  for (Csr<CopyId>* lists : {&r.reads, &r.makes}) lists->offset.assign(1, 0), lists->item.clear();
  r.own_run.assign(graph_.num_ops(), -1);
  current_.assign(values_.num_values(), -1);
  rerun_.clear();
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.producer[x] == kNoOp) current_[x] = new_copy(x, -1, r);
  }
  for (Step s = 0; s < static_cast<Step>(base_.size()); ++s) {
    stack_.assign(1, {base_[s], false, false, 0});
    while (!stack_.empty()) {
      Frame& frame = stack_.back();
      const auto [reads, overwrites, makes] = form({frame.op, s, frame.rerun, frame.replay, false, -1});
      OpId missing = kNoOp;
      bool replay = false;
      while (frame.next < reads.size() + overwrites.size()) {
        const ValueId x = frame.next < reads.size() ? reads[frame.next] : overwrites[frame.next - reads.size()];
        ++frame.next;
        if (usable(current_[x], s, drops, r)) continue;
        missing = values_.producer[x];
        if (missing == kNoOp || !values_.rerunnable(missing)) return false;
        replay = replayed(x, s, drops, r);
        break;
      }
      if (missing != kNoOp) {
        if (stack_.size() > base_.size()) return false;
        stack_.push_back({missing, true, replay, 0});
        continue;
      }
      if (!emit(frame, s, drops, r)) return false;
      stack_.pop_back();
    }
  }
  return true;
}

// Whether the maker of a missing value must rerun as a whole, replaying its random numbers: it has no shorter rerun for this
// value, or its saved results that the shorter one reads are gone too.
bool Rewriter::replayed(ValueId value, Step position, const DropSet& drops, const Rewrite& r) const {
  const OpId maker = values_.producer[value];
  if (values_.replays[maker] != Values::kWholeOrFirst) return values_.replays[maker] == Values::kWholeOnly;
  if (value != values_.makes[maker].front()) return true;
  const auto reads = values_.rerun_reads[maker];
  return std::any_of(reads.begin(), reads.end(),
                     [&](ValueId y) { return values_.producer[y] == maker && !usable(current_[y], position, drops, r); });
}

bool Rewriter::emit(const Frame& frame, Step position, const DropSet& drops, Rewrite& r) {
  const OpId v = frame.op;
  const RunId run = r.num_runs();
  r.runs.push_back({v, position, frame.rerun, frame.replay, false, -1});
  const auto [reads, overwrites, makes] = form(r.runs.back());
  for (const auto& list : {reads, overwrites}) {
    for (const ValueId x : list) {
      const CopyId copy = current_[x];
      if (!usable(copy, position, drops, r)) return false;  // another input's chain has overwritten it
      r.copies[copy].last_use = run;
      r.reads.item.push_back(copy);
    }
  }
  for (const ValueId x : overwrites) r.copies[current_[x]].consumed = true;
  for (const ValueId x : makes) {
    const CopyId copy = new_copy(x, run, r);
    r.makes.item.push_back(copy);
    if (!usable(current_[x], position, drops, r)) current_[x] = copy;
  }
  for (Csr<CopyId>* lists : {&r.reads, &r.makes}) lists->offset.push_back(static_cast<std::int64_t>(lists->item.size()));
  if (frame.rerun) {
    rerun_.push_back(v);
  } else {
    r.own_run[v] = run;
  }
  return true;
}

// A run may be deleted if nothing it makes is read and it has no other effect. Ops whose results the program never reads stay.
bool Rewriter::deletable(RunId run, const Rewrite& r) const {
  const OpId v = r.runs[run].op;
  const bool must_run = !r.runs[run].rerun && (static_cast<Rerun>(rules_.rerun[v]) != Rerun::kWhole || unmovable_[v] != 0);
  if (r.runs[run].dead || must_run || !values_.rerunnable(v)) return false;
  bool read_once = false;
  for (const CopyId c : r.makes[run]) {
    const ValueId x = r.copies[c].value;
    if (num_reads_[c] > 0 || (values_.output[x] != 0 && current_[x] == c)) return false;
    read_once = read_once || !values_.readers[x].empty();
  }
  return read_once;
}

void Rewriter::remove_dead_runs(Rewrite& r) {
  num_reads_.assign(r.copies.size(), 0);
  for (const CopyId c : r.reads.item) ++num_reads_[c];
  queue_.clear();
  r.added_seconds = 0;
  r.num_reruns = static_cast<std::int64_t>(rerun_.size());
  for (const OpId v : rerun_) {
    r.added_seconds += rules_.rerun_seconds[v];
    if (deletable(r.own_run[v], r)) queue_.push_back(r.own_run[v]);
  }
  while (!queue_.empty()) {
    const RunId run = queue_.back();
    queue_.pop_back();
    if (!deletable(run, r)) continue;
    r.runs[run].dead = true;
    --r.num_reruns;
    const OpId v = r.runs[run].op;
    r.added_seconds -= r.runs[run].rerun ? rules_.rerun_seconds[v] : rules_.seconds[v];
    for (const CopyId c : r.reads[run]) {
      const RunId made = r.copies[c].made;
      if (--num_reads_[c] == 0 && made >= 0 && deletable(made, r)) queue_.push_back(made);
    }
  }
}

void Rewriter::find_last_uses(Rewrite& r) {
  for (auto& copy : r.copies) copy.last_use = copy.made;
  for (const RunId run : r.alive()) {
    for (const CopyId c : r.reads[run]) r.copies[c].last_use = run;
  }
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.output[x] != 0 && current_[x] >= 0) r.copies[current_[x]].last_use = r.num_runs();
  }
}

// Finds the copies that get no buffer, and extends the lifetimes of their inputs to their last use.
void Rewriter::fuse(Rewrite& r) {
  if (rules_.fusion.empty()) return;
  in_memory_.assign(r.copies.size(), 0);
  for (const RunId run : r.alive()) {
    const bool opaque = fusion(r.runs[run].op) == Fusion::kNone;
    for (const CopyId c : r.reads[run]) {
      const RunId made = r.copies[c].made;
      const bool crosses = made >= 0 && r.runs[made].position < rules_.split && r.runs[run].position >= rules_.split;
      if (opaque || crosses) in_memory_[c] = 1;
    }
  }
  count_inputs(r);
  for (RunId run = r.num_runs(); run-- > 0;) {
    const auto makes = r.makes[run];
    if (r.runs[run].dead || fusion(r.runs[run].op) != Fusion::kPointwise || makes.size() != 1) continue;
    auto& copy = r.copies[makes[0]];
    copy.fused = in_memory_[makes[0]] == 0 && copy.last_use < r.num_runs() && copy.last_use > run;
    if (!copy.fused) {
      const OpId v = r.runs[run].op;
      r.added_seconds += r.runs[run].rerun ? rules_.store_seconds[v] : rules_.keep_seconds.empty() ? 0 : rules_.keep_seconds[v];
      continue;
    }
    for (const CopyId c : r.reads[run]) r.copies[c].last_use = std::max(r.copies[c].last_use, copy.last_use);
  }
}

// Puts values with too many inputs in memory if an unfused kernel runs before or at their last use.
void Rewriter::count_inputs(Rewrite& r) {
  num_reads_.assign(r.copies.size(), 0);
  kernels_.assign(1, 0);
  for (RunId run = 0; run < r.num_runs(); ++run) {
    const bool kernel = !r.runs[run].dead && fusion(r.runs[run].op) == Fusion::kNone;
    kernels_.push_back(kernels_.back() + (kernel ? 1 : 0));
    if (r.runs[run].dead) continue;
    for (const CopyId c : r.reads[run]) ++num_reads_[c];
  }
  num_inputs_.assign(r.copies.size(), 0);
  inputs_.resize(r.copies.size() * kMaxInputs);
  std::vector<CopyId> all;
  for (RunId run = 0; run < r.num_runs(); ++run) {
    const auto makes = r.makes[run];
    if (r.runs[run].dead || fusion(r.runs[run].op) != Fusion::kPointwise || makes.size() != 1) continue;
    all.clear();
    for (const CopyId c : r.reads[run]) {
      const auto of_input = inputs_.begin() + std::int64_t{c} * kMaxInputs;
      if (num_inputs_[c] == 0) all.push_back(c);
      all.insert(all.end(), of_input, of_input + num_inputs_[c]);
    }
    sort_unique(all);
    const CopyId made = makes[0];
    const bool many = all.size() > kMaxInputs || (all.size() > kMaxSharedInputs && num_reads_[made] > 1);
    const RunId last = std::min(r.copies[made].last_use, r.num_runs() - 1);
    if (many && kernels_[last + 1] > kernels_[run]) in_memory_[made] = 1;
    if (in_memory_[made] != 0 || all.size() > kMaxInputs) continue;  // counts as one input of what reads it
    num_inputs_[made] = static_cast<std::int32_t>(all.size());
    std::copy(all.begin(), all.end(), inputs_.begin() + std::int64_t{made} * kMaxInputs);
  }
}

// Lets the one result of a run take over the buffer of an input that nobody reads later; false if there is none. Inputs of a
// reduction in the same kernel are excluded, unless the rules allow them (reduced_in_place).
bool Rewriter::take_over(RunId run, Rewrite& r) {
  Rewrite::Copy& made = r.copies[r.makes[run][0]];
  const Bytes bytes = graph_.bytes(values_.tensor[made.value]);
  const RunId last = made.fused ? made.last_use : run;
  if (bytes == 0) return false;
  for (const CopyId read : r.reads[run]) {
    const CopyId c = r.copies[read].fused ? donated_input_[read] : read;
    if (c < 0) continue;
    const Rewrite::Copy& input = r.copies[c];
    const TensorId held = r.buffers[input.buffer].tensor;
    const bool reduced = !made.fused && !rules_.reduced_in_place && !reduced_.empty() && reduced_[c] == kernels_[run];
    if (reduced || input.last_use != last || graph_.producer(held) == kNoOp || graph_.bytes(held) != bytes) continue;
    if (made.fused) {
      donated_input_[r.makes[run][0]] = c;
    } else {
      made.buffer = r.runs[run].in_place = input.buffer;
    }
    return true;
  }
  return false;
}

void Rewriter::place(Rewrite& r) {
  donated_input_.assign(r.copies.size(), -1);
  reduced_.assign(rules_.fusion.empty() ? 0 : r.copies.size(), -1);
  auto open = [&](Rewrite::Copy& copy) {
    copy.buffer = static_cast<BufferId>(r.buffers.size());
    r.buffers.push_back({values_.tensor[copy.value], copy.made, copy.made});
  };
  for (auto& copy : r.copies) {
    if (copy.made < 0) open(copy);
  }
  for (const RunId run : r.alive()) {
    const auto reads = r.reads[run];
    const auto makes = r.makes[run];
    if (fusion(r.runs[run].op) == Fusion::kReduction) {
      for (const CopyId c : reads) {
        if (num_inputs_[c] == 0) reduced_[c] = kernels_[run];
        for (std::int32_t i = 0; i < num_inputs_[c]; ++i) reduced_[inputs_[std::int64_t{c} * kMaxInputs + i]] = kernels_[run];
      }
    }
    const std::size_t num_overwritten = form(r.runs[run]).overwrites.size();
    const std::size_t num_written = makes.size() - num_overwritten;
    for (std::size_t i = 0; i < makes.size(); ++i) {
      Rewrite::Copy& made = r.copies[makes[i]];
      if (i >= num_written) {
        made.buffer = r.copies[reads[reads.size() - makes.size() + i]].buffer;
        continue;
      }
      const bool taken = rules_.in_place[r.runs[run].op] != 0 && makes.size() == 1 && take_over(run, r);
      if (!taken && !made.fused) open(made);
    }
  }
}

void Rewriter::measure(Rewrite& r) const {
  for (const auto& copy : r.copies) {
    if (copy.buffer < 0) continue;
    r.buffers[copy.buffer].last = std::max(r.buffers[copy.buffer].last, std::min(copy.last_use, r.num_runs() - 1));
  }
  auto& live = r.live;
  live.assign(r.num_runs() + 1, 0);
  for (const auto& buffer : r.buffers) {
    if (!graph_.planned(buffer.tensor)) continue;
    const bool donated = graph_.producer(buffer.tensor) == kNoOp;
    if (donated && buffer.last < 0) continue;
    const Bytes bytes = graph_.bytes(buffer.tensor);
    live[donated ? 0 : buffer.first] += bytes;
    live[buffer.last + 1] -= bytes;
  }
  live.pop_back();
  Bytes sum = graph_.resident_bytes();
  r.peak = sum;
  r.peak_run = -1;
  for (RunId run = 0; run < r.num_runs(); ++run) {
    sum += live[run];
    live[run] = r.runs[run].dead ? 0 : sum + graph_.workspace(r.runs[run].op);
    if (!r.runs[run].dead && !absent_.empty()) live[run] -= absent_[r.runs[run].position];
    if (r.runs[run].dead || (r.peak_run >= 0 && live[run] <= r.peak)) continue;
    r.peak = live[run];
    r.peak_run = run;
  }
}

Rewritten Rewriter::graph(const Rewrite& r) const {
  Rewritten result;
  GraphData& d = result.data;
  for (const auto& [t, first, last] : r.buffers) {  // buffer b is tensor b
    result.tensor_origin.push_back(t);
    d.tensor_bytes.push_back(graph_.bytes(t));
    d.donated.push_back(graph_.donated(t) ? 1 : 0);
  }
  std::vector<OpId> first(graph_.num_ops(), kNoOp);  // op of the rewritten graph that stands for op v first
  std::vector<TensorId> reads, writes, mutates;
  std::vector<OpId> after;
  for (const RunId run : r.alive()) {
    const OpId v = r.runs[run].op;
    const bool is_rerun = r.runs[run].rerun;
    const auto of_reads = r.reads[run];
    const std::size_t num_overwritten = form(r.runs[run]).overwrites.size();
    reads.clear(), writes.clear(), mutates.clear(), after.clear();
    for (std::size_t i = 0; i < of_reads.size(); ++i) {
      (i + num_overwritten < of_reads.size() ? reads : mutates).push_back(r.copies[of_reads[i]].buffer);
    }
    const auto makes = r.makes[run];
    for (std::size_t i = 0; i + num_overwritten < makes.size(); ++i) {
      (r.runs[run].in_place >= 0 ? mutates : writes).push_back(r.copies[makes[i]].buffer);
    }
    for (const OpId u : graph_.data().after[v]) {
      if (first[u] != kNoOp) after.push_back(first[u]);
    }
    if (r.runs[run].replay) after.push_back(first[v]);  // that draws the numbers
    if (first[v] == kNoOp) first[v] = static_cast<OpId>(result.origin.size());
    result.origin.push_back(v);
    const auto rerun = r.runs[run].replay                   ? Rerun::kReplay
                       : !is_rerun                          ? Rerun::kNever
                       : values_.replays[v] != Values::kNot ? Rerun::kFirstResult
                                                            : static_cast<Rerun>(rules_.rerun[v]);
    result.rerun.push_back(static_cast<std::uint8_t>(rerun));
    d.reads.push_back(reads), d.writes.push_back(writes), d.mutates.push_back(mutates), d.after.push_back(after);
    d.workspace_bytes.push_back(graph_.workspace(v));
    d.random.push_back(is_rerun ? 0 : graph_.data().random[v]);
  }
  for (const TensorId t : graph_.data().outputs) {
    d.outputs.push_back(r.copies[current_[values_.last[t]]].buffer);
  }
  return result;
}

}  // namespace olla
