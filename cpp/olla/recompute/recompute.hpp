// One recomputation search: a base order, the rules of its ops, the decisions in force, and the bounds on all others.
#pragma once

#include "olla/recompute/bound.hpp"
#include "olla/recompute/improve.hpp"

namespace olla {

// Decisions one after the other: number i is the drops from offset[i] to offset[i + 1].
struct Decisions {
  std::vector<ValueId> values;  // of drop d: not kept past steps[d]
  std::vector<Step> steps;
  std::vector<std::int64_t> offset{0};
};

// What runs under the decisions in force, in order, and the copies of values that this makes.
struct Runs {
  std::vector<OpId> op;             // of run r
  std::vector<Step> position;       // base step whose op it serves
  std::vector<std::uint8_t> again;  // a rerun, not the op's own place in the base order
  std::vector<Bytes> live;
  Csr<CopyId> reads, makes;
  std::vector<ValueId> value;       // of copy c
  std::vector<std::uint8_t> fused;  // in no buffer: its readers compute it themselves
};

// Owns what its Evictor and its RecomputeBound refer to. For one thread.
class RecomputeSearch {
 public:
  // Keeps a reference to the graph. Throws GraphError: "program_order" if base is no order of the graph; "lengths" or "ids" where
  // the rules do not fit it.
  RecomputeSearch(const Graph& graph, Rules rules, std::vector<OpId> base);
  RecomputeSearch(const RecomputeSearch&) = delete;

  const Graph& graph() const { return graph_; }
  const Rules& rules() const { return rules_; }
  const Values& values() const { return values_; }
  std::span<const OpId> base() const { return base_; }
  Evictor& evictor() { return evictor_; }
  const Evictor& evictor() const { return evictor_; }
  RecomputeBound& bound() { return bound_; }

  // As olla::improve, with further starts: the drops at these ops that their bounds suggest for the target.
  void improve(const Target& target, std::uint64_t seed, int max_rounds, std::span<const OpId> ops, Control& control);

  // As of RecomputeBound, for ops[i]; 0 for those that are not reached in time.
  std::vector<Bytes> least_peak(std::span<const OpId> ops, double added_seconds, Control& control);
  std::vector<double> least_added_seconds(std::span<const OpId> ops, Bytes peak, Control& control);

  // Puts other drops in force, as one decision: values[i] is not kept past steps[i]. False, and none are, if a value can neither be
  // kept nor made. Throws GraphError "lengths" or "ids".
  bool reset(std::span<const ValueId> values, std::span<const Step> steps);
  // Puts the best choice in force that was ever simulated and meets the target's limit; false where there is none.
  bool recall(const Target& target);
  // absent[s]: bytes in host memory while base step s runs, which count nothing. Throws GraphError "lengths".
  void set_absent(std::vector<Bytes> absent);

  // Of the decisions in force. O(runs + uses).
  Decisions decisions() const;
  Runs runs() const;
  Rewritten rewritten();  // throws GraphError "fusion" if ops are fused: they make no graph

 private:
  const Graph& graph_;
  std::vector<OpId> base_;
  Rules rules_;
  Values values_;
  Evictor evictor_;
  RecomputeBound bound_;
};

}  // namespace olla
