// Greedy recomputation: drops values at the peak and re-simulates after every drop. One run records the whole trade-off curve.
#pragma once

#include <random>
#include <unordered_set>

#include "olla/base/control.hpp"
#include "olla/recompute/front.hpp"

namespace olla {

struct EvictLimits {
  Bytes peak = 0;               // stop once the peak is this low
  double added_seconds = 1e30;  // take no step beyond this
};

// The state of a search: decisions in force and what they make of the base order.
class Evictor {
 public:
  // All must outlive the evictor. base: a valid order, item s the op at step s; no decision is in force.
  Evictor(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base);

  // Greedy decisions until a limit is met or nothing lowers the peak. curve[i]: after the i-th of them. Deterministic unless time
  // ends it; a unit of work is one simulated run of an op.
  void run(const EvictLimits& limits, Control& control);

  const Rewrite& rewrite() const { return best_; }
  const std::vector<Decision>& decisions() const { return decisions_; }
  const std::vector<Point>& curve() const { return curve_; }
  const Front& front() const { return front_; }  // over all decisions ever in force since set_absent()
  Rewritten rewritten();                         // the graph that the decisions in force make

  // Replaces the decisions in force; false, and none are, if a needed value can then be neither kept nor made.
  bool reset(std::vector<Decision> decisions);
  // absent[s]: bytes that are in host memory while base step s runs; see Rewriter.
  void set_absent(std::vector<Bytes> absent);
  // Undoes decisions, most rerun seconds first, where the peak stays within [least, most] and no time is added.
  void reverse(Bytes most, Control& control, Bytes least = 0);
  // How the greedy weighs its candidates besides bytes per second.
  struct ScoreWeights {
    double noise = 0;   // multiplies scores by up to 1 + noise, at random
    double spread = 0;  // multiplies them by up to 1 + spread, by the share of the memory above `level` in their gap
    Bytes level = 0;
    std::uint64_t seed = 0;
  };
  void set_score_weights(const ScoreWeights& weights);

 private:
  struct Effort {
    double reach = 1;   // multiplies how far back ancestors are recomputed
    bool deep = false;  // try attempt_with_repairs()
    bool raise();       // false if there is no more
  };
  struct Candidate {
    double score;
    CopyId copy;
    Bytes bytes;
  };
  void drop_until(const EvictLimits& limits, Control& control);
  bool step(const EvictLimits& limits, Control& control);
  bool attempt_with_repairs(const Decision& decision, const EvictLimits& limits, Control& control);
  static Bytes live_at(const Rewrite& r, OpId op, Step position);
  std::vector<Candidate> find_candidates(Control& control);
  bool attempt(const Decision& decision, double most_seconds);
  double weight(CopyId copy);
  Point point() const { return {best_.peak, best_.added_seconds, decisions_.size()}; }
  bool take_back(std::span<const Drop> drops, Bytes most, Bytes least);

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  Rewriter rewriter_;
  DropSet drops_;
  DropCandidates at_peak_;
  Rewrite best_, trial_;
  std::vector<Decision> decisions_;
  std::vector<Point> curve_;
  Front front_;
  RunId peak_ = 0;
  Effort effort_;
  bool repairing_ = false;
  std::int64_t repair_work_ = 0;  // that may still be spent on repairs
  ScoreWeights score_weights_;
  std::vector<double> above_;  // memory above score_weights_.level, summed over the runs before run r
  std::mt19937_64 random_;
  std::unordered_set<std::uint64_t> tabu_;  // gaps whose drop was refused
};

}  // namespace olla
