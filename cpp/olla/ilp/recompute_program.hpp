// Recomputation as a mixed-integer program over a base order. Its answers are sets of drops, applied as in rewrite.hpp.
//
//     R[w,s] = 1   op w runs at step s of the base order: in its own place, or again, for what runs at s
//     K[x,j] = 1   value x is kept through its gap j: from one step at which it can be used or made to the next
//
// clang-format off
//     R[w,s] <= K[x, gap before s] + R[maker of x, s]            (a) what an op reads was kept, or is made for it
//     K[x,j] <= K[x,j-1] + R[maker of x, s]                      (b) what is kept from step s on was there; nothing once overwritten
//     R[u,s] <= sum of R[w,s] over those w at s that read it     (c) an op is recomputed where it is needed,
//     R[u,s] + K[x, gap before s] <= 1                           (d) and its one value is missing
//     sum over s of R[v,s] >= 1                                  (e) an op that does not run in its own place runs later
//     bytes at (w,s) <= peak, where R[w,s] = 1                   (f) resident + workspace + what w reads and makes - overlap
//                                                                    + sum of bytes[x] C[x,s]
// clang-format on
//
// C[x,s]: x is kept past step s; overlap: the result takes over an input that is kept no longer. For an op in its own place, the
// last to run at its step, (f) is exact. Around recomputed ops it leaves out what else is made at their step, in an order that
// the program does not know: what it rules out is impossible, but not all that it allows is possible. So answers are simulated, and
// cut_off() adds what they break. Ops that overwrite something are never recomputed here.
#pragma once

#include <functional>

#include "olla/ilp/recompute_choices.hpp"

namespace olla {

class RecomputeProgram {
 public:
  // search must outlive it. plain: the rewrite without drops. Of the target's peak and added time, the one that is minimised is a
  // proven bound. most_bytes: a peak that was reached. prune: as of RecomputeChoices.
  RecomputeProgram(const RecomputeSearch& search, const Rewrite& plain, const Target& target, Bytes most_bytes, bool prune,
                   std::int64_t max_nonzeros);

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
  using Run = RecomputeChoices::Run;
  using Answer = std::span<const double>;
  struct Derived {  // a column that follows from others
    Column column;
    std::function<double(Answer)> value;
  };

  void add_runs();
  void add_lives();
  void add_dependencies(Step step, const Run& run);
  Value needed(ValueId x, Step step);
  Value derive(std::function<double(Answer)> value);
  static double value(const Value& literal, Answer answer) {
    return literal.column < 0 ? literal.constant : answer[literal.column];
  }
  void add_memory(Step step, const Run& run);
  void add_touched(const Run& run, Sum& sum);
  void add_overlap(Step step, const Run& run, Sum& sum);
  Value kept_before(ValueId x, Step step) const;
  Value kept_after(ValueId x, Step step) const;
  Value carried(ValueId x, Step step);
  void add_row(double from, double to, const Sum& sum);
  void rule_out(const Rewrite& rewrite, RunId run, Bytes limit);

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  const std::span<const OpId> base_;
  const Target target_;
  const Bytes most_bytes_;
  Program program_;
  bool too_large_ = false, impossible_ = false;
  double unit_ = 1, per_second_ = 1, offset_seconds_ = 0;
  Column peak_ = -1;
  RecomputeChoices choices_;
  std::vector<std::vector<std::pair<ValueId, Value>>> carried_;  // of step s, derived so far
  std::vector<Derived> derived_;
  std::vector<std::pair<Step, OpId>> bounded_;  // recomputations that have a row (f)
};

}  // namespace olla
