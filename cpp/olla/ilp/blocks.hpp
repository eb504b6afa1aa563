// Safe moves: ops that some best order runs directly after, or directly before, one known other op. Glued together such ops form a
// block, which starts once and runs through; an ordering program then needs variables for blocks only.
//
// An op is glued after its only direct predecessor u if it never keeps more than it frees and needs no more room than u, whatever
// the order: moving it there from a later place lowers or keeps the memory of every step between. Mirrored in time, an op is glued
// before its only direct successor if it never frees more than it keeps. In-place updates are of the first kind, pure allocations
// of the second. Ops that allocate nothing and wait for nothing else run before all others: the prefix.
#pragma once

#include "olla/graph/closure.hpp"
#include "olla/graph/graph.hpp"

namespace olla {

struct Blocks {
  Csr<OpId> members;         // of block b, in running order
  std::vector<OpId> anchor;  // of block b: the member the others move to
  std::vector<OpId> block;   // of op v
  std::vector<Step> offset;  // of op v: its place within its block
  bool has_prefix = false;   // block 0 runs before all others

  OpId size() const { return static_cast<OpId>(members.size()); }
  Step length(OpId b) const { return static_cast<Step>(members[b].size()); }
};

enum class Moves : std::uint8_t {
  kSafe,       // no order's peak rises
  kShortening  // of these: no lifetime grows either, so that a layout stays one. Ops that only free, or only allocate.
};

// graph's closure, with precedences beyond the dependencies if it has any. O(ops + uses * users).
Blocks glue(const Graph& graph, const Closure& closure, Moves moves = Moves::kSafe);
Blocks singletons(const Graph& graph);  // every op a block of its own

// The order with every block moved to its anchor: valid if order is, and its peak is not above that of order. O(ops).
std::vector<OpId> gather(const Blocks& blocks, std::span<const OpId> order);

}  // namespace olla
