// OLLA's lifetime program: the order of least peak as a mixed-integer program.
//
// OLLA (arXiv 2210.12924, equations (1)-(5), (10)-(14)) has a variable C[e,t], "tensor e is created at step t", and P[e,t], "e is
// preserved at step t". The program here is the same with exactly one op per step, in cumulative variables:
//
//     Y[v,t] = 1  op v has run by the end of step t      x[v,t] = Y[v,t] - Y[v,t-1]: v runs at step t
//     C[e,t] = x[v,t] for every e that v writes                                              (3), (5)
//     live[e,t] = C[e,t] + P[e,t] = Y[v,t] - D[e,t],  D[e,t] <= Y[u,t-1] for every user u    (1), (2)
//     Y[w,t] <= Y[v,t-1] for every direct dependency v -> w, with a tensor or without        (4)
//     sum over v of Y[v,t] = t + 1: one op per step
//     resident + sum of S[e] live[e,t] + sum of workspace[v] x[v,t] <= peak for every step t (13), (14)
//
// D, "e is dead before step t", is continuous: only upper bounds on it and memory rows mention it, and those only want it large;
// with binary Y its best value is the least Y[u,t-1], which is the truth. With one last user, D is that user's Y and no variable at
// all. Precedence rows have two entries, +1 and -1: without the one-per-step and memory rows the matrix is totally unimodular.
//
// Left out, not fixed: ops glued into blocks share the variables of their block (blocks.hpp); steps outside a block's window
// (windows.hpp); tensors that are certainly live, or dead, at a step are constants; precedences that others imply; rows another row
// implies; memory rows that cannot exceed the lower bound of the peak, which is a bound of the column `peak`.
#pragma once

#include <functional>
#include <optional>

#include "olla/ilp/program.hpp"
#include "olla/ilp/windows.hpp"

namespace olla {

// The greatest common divisor of all sizes that can change the peak: peaks differ by multiples of it.
Bytes peak_grid(const Graph& graph);

// The most bytes that are certainly live during one op, or the resident bytes of a graph too large for an ordering program.
Bytes simple_bound(const Graph& graph);

struct OrderProgramOptions {
  Bytes target = kMaxBytes;  // only orders with peak <= target are described
  Bytes lower_bound = 0;     // proven: the program need not tell peaks below it apart
  bool reduce = true;        // safe moves, precedences and steps ruled out by the target
  Moves moves = Moves::kSafe;
  bool split = false;                     // large coefficients into two rows instead of rounding sizes: exact, slower to solve
  std::int64_t max_nonzeros = 2'000'000;  // beyond it the program is not built
};

// An answer of the program is decoded into an order; an order with peak <= target encodes into an answer. The program counts memory
// in units: the common divisor of all sizes. Where coefficients would pass what floating point tells apart reliably, they are split
// in two rows, if asked for; else the unit is larger, sizes are rounded down, and the program's optimum is a lower bound, not the
// peak itself.
class OrderProgram : public TargetProgram {
 public:
  // stop() is asked during the reductions: true leaves them unfinished, which only makes the program larger.
  OrderProgram(const Graph& graph, const OrderProgramOptions& options, const std::function<bool()>& stop);

  const Blocks& blocks() const { return blocks_; }
  std::int64_t num_nonzeros() const { return num_nonzeros_; }  // if kTooLarge: at least

  // The answer that stands for the order with its safe moves made. The order's peak must be within the target; empty if it cannot
  // be.
  std::vector<double> encode(std::span<const OpId> order) const;
  std::vector<OpId> decode(std::span<const double> values) const;

 protected:
  Value has_run(OpId v, Step step) const { return started(blocks_.block[v], step - blocks_.offset[v]); }  // Y[v,t]

  Blocks blocks_;
  Windows windows_;
  std::optional<Closure> closure_;  // of the graph with the precedences that the target implies
  Column peak_ = 0;                 // counts from the base on

 private:
  friend class OrderProgramBuilder;

  Value started(OpId block, Step step) const;

  struct Death {  // a column D[e,t] and the columns of the users it waits for
    Column column;
    std::vector<Column> users;
  };

  struct MemoryRow {  // terms - peak <= right; carry: see add_memory_rows
    std::vector<Term> terms;
    double right;
    Column carry;
  };

  std::vector<Column> first_column_;  // of block b: one column for each start but the last
  std::vector<Death> deaths_;
  std::vector<MemoryRow> memory_;
  bool split_ = false;  // memory rows have carries
  std::int64_t num_nonzeros_ = 0;
};

}  // namespace olla
