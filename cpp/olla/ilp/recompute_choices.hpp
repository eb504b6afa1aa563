// Over a base order: which ops may run at which step, in their own place or again, and through which gaps values may be kept.
#pragma once

#include <algorithm>

#include "olla/ilp/program.hpp"
#include "olla/recompute/recompute.hpp"

namespace olla {

inline bool contains(std::span<const ValueId> list, ValueId x) { return std::find(list.begin(), list.end(), x) != list.end(); }

class RecomputeChoices {
 public:
  struct Run {
    OpId op;
    bool rerun;
    Value runs;  // a binary, or decided
  };
  struct Life {               // of a value
    std::vector<Step> steps;  // at which it can be used or made; -1: from the start, num_ops: an output. Empty: always there
    std::vector<Value> kept;  // through gap j, from steps[j] to steps[j + 1]
  };

  // search must outlive it. plain: the rewrite without drops. prune: a value can be missing at a step only if the base order
  // leaves it idle before, at a step whose memory is above the peak. max_size: limits the size of these lists; beyond it they are
  // incomplete, and too_large() is true.
  RecomputeChoices(const RecomputeSearch& search, const Rewrite& plain, Bytes peak, bool prune, std::int64_t max_size);

  bool too_large() const { return too_large_; }

  const Run* find(OpId op, Step step, bool rerun) const;  // nullptr: it does not run there
  const Run* find_maker(ValueId x, Step step) const { return remade(x) ? find(values_.producer[x], step, true) : nullptr; }
  bool movable(OpId v) const;    // it need not run in its own place
  bool remade(ValueId x) const;  // something makes it again
  std::span<const ValueId> reads(const Run& run) const { return run.rerun ? values_.rerun_reads[run.op] : values_.reads[run.op]; }
  std::span<const ValueId> overwrites(const Run& run) const {
    return run.rerun ? values_.rerun_overwrites[run.op] : values_.overwrites[run.op];
  }
  std::span<const ValueId> makes(const Run& run) const { return run.rerun ? values_.rerun_makes[run.op] : values_.makes[run.op]; }
  bool uses(const Run& run, ValueId x) const { return contains(reads(run), x) || contains(overwrites(run), x); }
  Bytes bytes(ValueId x) const { return graph_.bytes(values_.tensor[x]); }

  std::vector<std::vector<Run>> runs;          // at step s, its own op first
  std::vector<std::vector<Step>> rerun_steps;  // of op v: where it may be recomputed
  std::vector<Life> lives;                     // of value x; nothing is said yet of what is kept
  std::vector<std::vector<ValueId>> around;    // of step s: values that may be kept past it
  std::vector<std::vector<Step>> accesses;     // of value x: steps at which the base order makes or uses it
  std::vector<Step> step_of;                   // of op v in the base order
  std::vector<Step> overwritten;               // of value x: the step that overwrites it, or num_ops

 private:
  void read_base(const Rewrite& plain);
  bool find_runs(std::int64_t max_size);  // false: they are too many
  bool find_lives(std::int64_t max_size);
  bool may_be_missing(ValueId x, Step step) const;

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  const std::span<const OpId> base_;
  const Bytes peak_;
  const bool prune_;
  bool too_large_ = false;
  std::vector<std::int64_t> num_above_;  // steps before step s whose memory is above the peak
  std::vector<std::uint8_t> unmovable_;  // of op v: others list it in `after`
};

}  // namespace olla
