// Values, not storages: what a tensor holds between two mutations, who makes it and who reads it; and how an op may be
// recomputed.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla {

using ValueId = std::int32_t;
inline constexpr ValueId kNoValue = -1;

enum class Rerun : std::uint8_t {
  kNever,        // random, or it changes what lasts beyond the step
  kWhole,        // the op once more, as it is
  kFirstResult,  // its first result alone, from `rerun_reads`: a norm from its statistics
  kReplay        // replays the random numbers of its own run; or as kFirstResult, if its `rerun_reads` are in memory
};

// How an op shares a kernel with others, where a compiler fuses them.
enum class Fusion : std::uint8_t {
  kNone,       // a kernel of its own: what it reads and makes is in memory
  kPointwise,  // joins its readers: its result is in memory only where one of them needs that
  kReduction   // joins what it reads; its result is in memory
};

// What may be done with each op, and what it costs. Index v of every list is op v.
struct Rules {
  std::vector<double> seconds;         // of one run
  std::vector<std::uint8_t> rerun;     // Rerun
  std::vector<double> rerun_seconds;   // of recomputing it
  Csr<TensorId> rerun_reads;           // kFirstResult, kReplay: what that reads; may name tensors the op itself writes
  std::vector<std::uint8_t> in_place;  // its one result may take over the storage of an input that dies there, if as
                                       // large; where the program has it change a tensor, it may write elsewhere instead
  std::vector<std::uint8_t> fusion;    // Fusion; empty: nothing is fused
  std::vector<double> store_seconds;   // of op v, if fused: extra rerun seconds where its result is in memory
  std::vector<double> keep_seconds;    // the same of its own run; empty: nothing
  std::vector<std::uint8_t> unsaved;   // what op v made before the split is not read after it; empty: everything may be
  bool reduced_in_place = false;       // pointwise results take over what a reduction in the same kernel reads, too
  Step split = 0;                      // first op of a second program, 0: none (base order = op order). No kernel spans it
};

// Immutable. O(graph).
class Values {
 public:
  // Throws GraphError "lengths" or "ids" where the rules do not fit the graph.
  Values(const Graph& graph, const Rules& rules);

  ValueId num_values() const { return static_cast<ValueId>(tensor.size()); }

  // Of value i: the tensor that holds it, the op that makes it (kNoOp: there from the start).
  std::vector<TensorId> tensor;
  std::vector<OpId> producer;
  std::vector<ValueId> last;         // of tensor t: what it holds at the end of the step
  std::vector<std::uint8_t> output;  // live to the end of the step

  // Of op v, in the order of the lists of the graph: what it reads, what it overwrites (also read), what it makes: a value for each
  // tensor it writes, then one for each it overwrites.
  Csr<ValueId> reads, overwrites, makes;
  // The same of recomputing it; all empty where it never may. kReplay: reads as kFirstResult, makes as a whole run.
  Csr<ValueId> rerun_reads, rerun_overwrites, rerun_makes;
  Csr<OpId> readers;  // of value i: ops that read or overwrite it, in program order

  struct Form {
    std::span<const ValueId> reads, overwrites, makes;
  };
  enum Replays : std::uint8_t { kNot, kWholeOnly, kWholeOrFirst };
  std::vector<Replays> replays;  // of op v
  // What op v uses and makes. own: in its own place or a replay of the whole; rerun: in any other rerun.
  Form own(OpId v) const { return {reads[v], overwrites[v], makes[v]}; }
  Form rerun(OpId v) const {
    const auto made = rerun_makes[v];
    return {rerun_reads[v], rerun_overwrites[v], replays[v] == kWholeOrFirst ? made.first(1) : made};
  }
  bool rerunnable(OpId v) const { return rerun_makes[v].size() > 0; }
  bool remade(ValueId x) const {  // does a rerun of its op make it: all results, or the first alone
    if (producer[x] == kNoOp) return false;
    const auto made = rerun_makes[producer[x]];
    return !made.empty() && (made.size() == makes[producer[x]].size() || made.front() == x);
  }

 private:
  void number(const Graph& graph, const Rules& rules);
  void add_reruns(const Graph& graph, const Rules& rules);
};

}  // namespace olla
