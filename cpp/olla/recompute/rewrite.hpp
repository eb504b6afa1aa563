// Turns decisions into an op list. The base order is walked; before a reader whose input was dropped, the maker of that
// input is recomputed, preceded by reruns for its own inputs, depth first. Then runs that nobody reads are deleted (so
// an op needed only later moves there), and results take over inputs that die, where the op allows it.
#pragma once

#include <ranges>

#include "olla/graph/values.hpp"

namespace olla {

using CopyId = std::int32_t;    // one computation of a value: value i may have several
using BufferId = std::int32_t;  // a storage of the rewritten graph: copies follow each other in it
using RunId = std::int32_t;     // position in the rewritten op list

// The value is not kept past the base step: later readers read a new copy.
struct Drop {
  ValueId value;
  Step step;
  bool operator==(const Drop&) const = default;
};

// What a set of drops makes of the base order. Memory as in profile.hpp.
struct Rewrite {
  struct Run {
    OpId op;
    Step position;      // base step whose op it serves
    bool rerun;         // not the op's own place in the base order
    bool replay;        // a whole rerun that draws the numbers of the op's own run
    bool dead;          // nobody reads what it makes: left out of the result, but numbered
    BufferId in_place;  // the buffer its one result takes over, or -1
  };
  struct Copy {
    ValueId value;
    RunId made, last_use;  // made: -1 if there from the start; last_use: made if nobody reads it, num_runs if an output
    BufferId buffer;
    bool consumed;  // overwritten by its last use
    bool fused;     // in no buffer: its readers compute it themselves, from what its run reads
  };
  struct Buffer {
    TensorId tensor;    // of the graph, whose size it has
    RunId first, last;  // runs during which it is live
  };
  std::vector<Run> runs;
  std::vector<Copy> copies;
  std::vector<Buffer> buffers;
  Csr<CopyId> reads, makes;    // of run r: reads first, then what it overwrites; makes as in Values
  std::vector<RunId> own_run;  // of op v: its run in the base order
  std::vector<Bytes> live;     // during run r; 0 if dead
  Bytes peak = 0;
  RunId peak_run = 0;
  double added_seconds = 0;     // beyond one run of every op, and for what fused ops store
  std::int64_t num_reruns = 0;  // runs beyond one per op

  RunId num_runs() const { return static_cast<RunId>(runs.size()); }
  auto alive() const {  // the runs that are not dead, in order
    return std::views::iota(RunId{0}, num_runs()) | std::views::filter([this](RunId r) { return !runs[r].dead; });
  }
};

// A graph, and where it comes from.
struct Rewritten {
  GraphData data;                       // results of op i: its writes, then what it overwrites, in the order of the original's
  std::vector<OpId> origin;             // op of the original graph that op i stands for
  std::vector<std::uint8_t> rerun;      // how op i runs (Rerun); kNever: in its own place
  std::vector<TensorId> tensor_origin;  // tensor of the original graph that tensor t holds first
};

// The drops in force: the base steps at which a value is not kept, sorted, per value.
class DropSet {
 public:
  explicit DropSet(ValueId num_values) : steps_(num_values) {}
  bool add(const Drop& drop);             // false if it was there
  bool remove(const Drop& drop);          // false if it was not there
  bool add(std::span<const Drop> drops);  // false, and none is added, if one was there
  void remove(std::span<const Drop> drops) {
    for (const Drop& drop : drops) remove(drop);
  }
  bool between(ValueId value, Step made, Step read) const;  // is a copy of step `made` gone at step `read`?

 private:
  std::vector<std::vector<Step>> steps_;
};

class Rewriter {
 public:
  // All must outlive the rewriter. base must be valid for graph (Graph::is_order).
  Rewriter(const Graph& graph, const Values& values, const Rules& rules, std::span<const OpId> base);

  // Bytes that are in host memory while base step s runs, whatever the drops: they count nothing. Empty: none.
  void set_absent(std::vector<Bytes> absent) { absent_ = std::move(absent); }

  // False if a reader's input can neither be kept nor made again; result is then unspecified. O(runs + uses).
  bool build(const DropSet& drops, Rewrite& result);

  // The rewritten graph of the rewrite built last: the runs that are not dead, in their order.
  Rewritten graph(const Rewrite& rewrite) const;

 private:
  struct Frame {
    OpId op;
    bool rerun, replay;
    std::size_t next;  // of its inputs
  };
  bool replayed(ValueId value, Step position, const DropSet& drops, const Rewrite& r) const;
  Values::Form form(const Rewrite::Run& run) const {
    return run.rerun && !run.replay ? values_.rerun(run.op) : values_.own(run.op);
  }
  Fusion fusion(OpId v) const;
  bool walk(const DropSet& drops, Rewrite& r);
  bool emit(const Frame& frame, Step position, const DropSet& drops, Rewrite& r);
  bool usable(CopyId copy, Step position, const DropSet& drops, const Rewrite& r) const;
  void remove_dead_runs(Rewrite& r);
  void find_last_uses(Rewrite& r);
  void fuse(Rewrite& r);
  void count_inputs(Rewrite& r);
  bool take_over(RunId run, Rewrite& r);
  void place(Rewrite& r);
  void measure(Rewrite& r) const;
  CopyId new_copy(ValueId value, RunId made, Rewrite& r);
  bool deletable(RunId run, const Rewrite& r) const;

  const Graph& graph_;
  const Values& values_;
  const Rules& rules_;
  std::span<const OpId> base_;
  std::vector<Bytes> absent_;
  std::vector<std::uint8_t> unmovable_;  // op v must run in its place: others list it in `after`
  std::vector<CopyId> current_;          // of value i, in the walk
  std::vector<std::int32_t> num_reads_;  // of copy c
  std::vector<Frame> stack_;
  std::vector<RunId> queue_;
  std::vector<OpId> rerun_;               // ops that are recomputed
  std::vector<std::uint8_t> in_memory_;   // copy c must be in memory, whatever is fused
  std::vector<std::int32_t> num_inputs_;  // of fused copy c: buffers that a kernel computing it reads
  std::vector<CopyId> inputs_;            // those; kMaxInputs entries per copy
  std::vector<std::int32_t> kernels_;     // before run r: runs that are kernels of their own
  std::vector<std::int32_t> reduced_;     // of copy c: kernels before the last reduction that reads it
  std::vector<CopyId> donated_input_;     // of fused copy c: an input whose buffer its last reader may take over, or -1
};

}  // namespace olla
