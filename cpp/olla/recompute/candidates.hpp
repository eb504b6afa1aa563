// The candidates for recomputation at the peak of a rewritten op list, and what recomputing each of them takes.
#pragma once

#include <utility>

#include "olla/base/marks.hpp"
#include "olla/recompute/rewrite.hpp"

namespace olla {

// Drops that go together: a value, and those of its ancestors that would otherwise have to be kept for it.
using Decision = std::vector<Drop>;

inline constexpr double kFreeSeconds = 1e-9;  // seconds of a step that costs nothing, so that scores stay finite

class DropCandidates {
 public:
  // All must outlive it. drops: those in force whenever it looks.
  DropCandidates(const Graph& graph, const Values& values, const Rules& rules, const DropSet& drops);

  // Finds each copy's uses around a run, which the methods below refer to until the next look(); the rewrite must stay alive.
  // O(runs + uses).
  void look(const Rewrite& rewrite, RunId peak);

  bool is_candidate(CopyId copy) const;  // made and used before the run, and used after it
  std::uint64_t key(CopyId copy) const;  // identifies that gap by its base steps
  RunId previous(CopyId copy) const { return previous_[copy]; }
  RunId next(CopyId copy) const { return next_[copy]; }

  // The drops that free a copy at the run, bytes freed there, seconds added; false if it cannot be recomputed. reach
  // multiplies the limit on rerunning its ancestors rather than keeping them.
  bool estimate(CopyId copy, double reach, Decision& decision, Bytes& freed, double& seconds);

  std::int64_t take_work() { return std::exchange(work_, 0); }  // of estimates since the last call

 private:
  struct Closure {  // of a drop: what has to be recomputed right before a run
    RunId use;
    Step step;
    Bytes kept_bytes;  // of ancestors kept instead
    double seconds;
    std::int64_t id;
  };
  Bytes highest(RunId first, RunId end) const;
  double cost(OpId op) const;
  void add_rerun(OpId op, double seconds);
  bool need(ValueId y, Decision& decision);
  bool moves(CopyId copy) const;

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  const DropSet& drops_;
  const Rewrite* rewrite_ = nullptr;
  RunId peak_ = 0;
  std::vector<RunId> previous_, next_;       // of copy c: uses around the peak
  std::vector<RunId> last_rerun_;            // of op v: its last run beyond its own, or -1
  std::vector<std::int64_t> copies_offset_;  // of value i: its copies, in order of making
  std::vector<CopyId> copies_of_;
  std::vector<Bytes> blocks_;  // the most memory during every kBlock runs
  Closure closure_{};
  std::vector<OpId> ops_;                 // of the closure
  std::vector<std::int64_t> closure_of_;  // of op v: the id of the latest closure it belongs to
  std::vector<Drop> kept_;                // ancestors it keeps, and where they could be dropped
  Marks is_kept_;                         // of value i: whether it is among them
  std::int64_t work_ = 0;
};

}  // namespace olla
