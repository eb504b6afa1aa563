// What not to keep, as a mixed-integer program over a base order. Its answers are sets of drops, and mean what rewrite.hpp makes of
// them.
//
//     R[w,s] = 1   op w runs at step s of the base order: in its own place, or again, for what runs at s
//     K[x,j] = 1   value x is kept through its gap j: from one step at which it can be used or made to the next
//
//     R[w,s] <= K[x, gap before s] + R[maker of x, s]           (a) what an op reads was kept, or is made for it
//     K[x,j] <= K[x,j-1] + R[maker of x, s]                     (b) what is kept from step s on was there; no more, once
//     overwritten R[u,s] <= sum of R[w,s] over those w at s that read it    (c) an op runs again where it is needed, R[u,s] + K[x,
//     gap before s] <= 1                          (d) and its one value is missing sum over s of R[v,s] >= 1 (e) an op that does
//     not run in its own place runs later bytes at (w,s) <= peak, where R[w,s] = 1                  (f) resident + workspace + what
//     w reads and makes - overlap
//                                                                   + sum of bytes[x] C[x,s]
//
// C[x,s]: x is kept past step s; overlap: the result takes over an input that is kept no longer. For an op in its own place, the
// last to run at its step, (f) is exact. Around ops that run again it leaves out what else is made at their step, in an order that
// the program does not know: what it rules out is impossible, but not all that it allows is possible. So answers are simulated, and
// cut_off() adds what they break. Ops that overwrite something never run again here.
#pragma once

#include <functional>

#include "olla/program.hpp"
#include "olla/rewrite.hpp"

namespace olla {

// Either the least added time, from a proven bound on, with at most this peak; or the least peak, from a proven bound on, with at
// most this added time.
struct BudgetTarget {
  bool least_time;
  Bytes peak;
  double added_seconds;
};

class BudgetProgram {
 public:
  // All but plain must outlive it. plain: the rewrite without drops. most_bytes: a peak that was reached. prune: a value can be
  // missing at a step only if the base order leaves it idle before, at a step whose memory is above the target.
  BudgetProgram(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base, const Rewrite& plain,
                const BudgetTarget& target, Bytes most_bytes, bool prune, std::int64_t max_nonzeros);

  bool too_large() const { return too_large_; }
  bool impossible() const { return impossible_; }  // a row alone proves that there is no answer
  const Program& program() const { return program_; }

  double added_seconds(double objective) const { return objective / per_second_ + offset_seconds_; }  // where that is minimised
  double peak(double objective) const { return objective * unit_; }                                   // where that is
  std::vector<Drop> decode(std::span<const double> answer) const;
  // What a set of drops makes as an answer; empty where the program does not describe it.
  std::vector<double> encode(const Rewrite& rewrite) const;
  // Adds rows that rule out an answer which, simulated, needs more than limit.
  void cut_off(const Rewrite& rewrite, Bytes limit);

 private:
  struct Literal {  // a binary: a column, or decided
    Column column = -1;
    double value = 0;
  };
  struct Run {
    OpId op;
    bool again;
    Literal runs;
  };
  struct Life {                 // of a value
    std::vector<Step> steps;    // at which it can be used or made; -1: from the start, num_ops: an output. Empty: always there
    std::vector<Literal> kept;  // through gap j, from steps[j] to steps[j + 1]
  };
  struct Sum {
    std::vector<Term> terms;
    double constant = 0, most = 0;  // most: its largest value
    void add(const Literal& literal, double factor);
  };
  using Answer = std::span<const double>;
  struct Derived {  // a column that follows from others
    Column column;
    std::function<double(Answer)> value;
  };

  void read_base(const Rewrite& plain);
  void find_runs();
  bool may_be_missing(ValueId x, Step step) const;
  void find_lives();
  void add_runs();
  void add_lives();
  void add_dependencies();
  void add_dependencies(Step step, const Run& run);
  Literal needed(ValueId x, Step step);
  Literal derive(std::function<double(Answer)> value);
  static double value(const Literal& literal, Answer answer) { return literal.column < 0 ? literal.value : answer[literal.column]; }
  void add_memory(Step step, const Run& run);
  void add_touched(Step step, const Run& run, Sum& sum);
  void add_overlap(Step step, const Run& run, Sum& sum);
  Literal kept_before(ValueId x, Step step) const;
  Literal kept_after(ValueId x, Step step) const;
  Literal carried(ValueId x, Step step);
  const Run* find(OpId op, Step step, bool again) const;
  bool movable(OpId v) const;
  bool remade(ValueId x) const;
  std::span<const ValueId> reads(const Run& run) const { return run.again ? values_.rerun_reads[run.op] : values_.reads[run.op]; }
  std::span<const ValueId> overwrites(const Run& run) const {
    return run.again ? values_.rerun_overwrites[run.op] : values_.overwrites[run.op];
  }
  std::span<const ValueId> makes(const Run& run) const { return run.again ? values_.rerun_makes[run.op] : values_.makes[run.op]; }
  Bytes bytes(ValueId x) const { return graph_.bytes(values_.tensor[x]); }
  void add_row(double from, double to, const Sum& sum);
  void rule_out(const Rewrite& rewrite, RunId run, Bytes limit);

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  const std::span<const OpId> base_;
  const BudgetTarget target_;
  const Bytes most_bytes_;
  const bool prune_;
  Program program_;
  bool too_large_ = false, impossible_ = false;
  double unit_ = 1, per_second_ = 1, offset_seconds_ = 0;
  Column peak_ = -1;
  std::vector<Step> step_of_;                                      // of op v in the base order
  std::vector<Step> overwritten_;                                  // of value x: the step that overwrites it, or num_ops
  std::vector<std::int64_t> num_above_;                            // steps before step s whose memory is above the target
  std::vector<std::vector<Step>> accesses_;                        // of value x: steps at which the base order makes or uses it
  std::vector<std::uint8_t> unmovable_;                            // of op v: others come after it by name
  std::vector<std::vector<Run>> runs_;                             // at step s, its own op first
  std::vector<std::vector<Step>> steps_again_;                     // of op v: where it may run again
  std::vector<Life> lives_;                                        // of value x
  std::vector<std::vector<ValueId>> around_;                       // of step s: values that may be kept past it
  std::vector<std::vector<std::pair<ValueId, Literal>>> carried_;  // of step s, derived so far
  std::vector<Derived> derived_;
  std::vector<std::pair<Step, OpId>> bounded_;  // runs again that have a row (f)
};

}  // namespace olla
