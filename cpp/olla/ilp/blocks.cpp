#include "olla/ilp/blocks.hpp"

#include <algorithm>

namespace olla {
namespace {

// What op v does to the memory in any order, in bytes.
struct Effect {
  Bytes kept = 0;       // written and still live afterwards
  Bytes vanishing = 0;  // written, but used by nobody
  Bytes freed_min = 0;  // certainly freed afterwards, of what it uses
  Bytes freed_max = 0;  // possibly freed afterwards, of what it uses
};

Effect effect_of(const Graph& graph, const Closure& closure, OpId v) {
  Effect e;
  for (const TensorId t : graph.writes(v)) {
    (graph.users(t).empty() && !graph.output(t) ? e.vanishing : e.kept) += graph.bytes(t);
  }
  for (const TensorId t : graph.uses(v)) {
    if (!graph.planned(t) || graph.output(t)) continue;
    const auto users = graph.users(t);  // the last one first: it decides most often
    if (std::all_of(users.rbegin(), users.rend(), [&](OpId u) { return closure.before.test(v, u); })) e.freed_min += graph.bytes(t);
    if (std::none_of(users.rbegin(), users.rend(), [&](OpId u) { return u != v && closure.after.test(v, u); }))
      e.freed_max += graph.bytes(t);
  }
  return e;
}

// glued_after[v] (glued_before[v]): the op that v follows (precedes), or kNoOp. No op has both, and none in the prefix has any.
struct Glue {
  std::vector<OpId> glued_after, glued_before, prefix;
};

Glue safe_moves(const Graph& graph, const Closure& closure, Moves allowed) {
  const OpId n = graph.num_ops();
  std::vector<Effect> effect;
  for (OpId v = 0; v < n; ++v) effect.push_back(effect_of(graph, closure, v));
  Glue moves{std::vector<OpId>(n, kNoOp), std::vector<OpId>(n, kNoOp), {}};
  std::vector<std::uint8_t> in_prefix(n, 0);
  std::vector<OpId> waits_for;
  for (const OpId v : closure.order) {
    const Effect& e = effect[v];
    const Bytes room = e.kept + e.vanishing + graph.workspace(v);
    waits_for.clear();
    for (const OpId u : closure.preds[v]) {
      if (in_prefix[u] == 0) waits_for.push_back(u);
    }
    if (waits_for.empty() && room == 0) {
      in_prefix[v] = 1;
      moves.prefix.push_back(v);
      continue;
    }
    const bool may_reorder_bytes = allowed == Moves::kSafe;
    if (waits_for.size() == 1 && e.kept <= e.freed_min && (may_reorder_bytes || room == 0)) {
      // Right after u its step needs: live after u + room; u's own step had: live after u + what u freed + its workspace.
      const OpId u = waits_for[0];
      if (room <= effect[u].freed_min + effect[u].vanishing + graph.workspace(u)) {
        moves.glued_after[v] = u;
        continue;
      }
    }
    const bool only_allocates = e.freed_max == 0 && e.vanishing == 0 && graph.workspace(v) == 0;
    if (closure.succs[v].size() == 1 && e.kept >= e.freed_max && (may_reorder_bytes || only_allocates)) {
      const OpId w = closure.succs[v][0];
      if (e.freed_max + e.vanishing + graph.workspace(v) <= graph.new_bytes(w) + graph.workspace(w)) moves.glued_before[v] = w;
    }
  }
  return moves;
}

void append_block(Blocks& blocks, std::span<const OpId> members, OpId anchor) {
  for (std::size_t i = 0; i < members.size(); ++i) {
    blocks.block[members[i]] = blocks.size();
    blocks.offset[members[i]] = static_cast<Step>(i);
  }
  blocks.members.push_back(members);
  blocks.anchor.push_back(anchor);
}

}  // namespace

Blocks glue(const Graph& graph, const Closure& closure, Moves allowed) {
  const OpId n = graph.num_ops();
  const Glue moves = safe_moves(graph, closure, allowed);
  std::vector<std::vector<OpId>> list(n);  // of its anchor: a block in running order
  std::vector<OpId> anchor(n);
  for (OpId v = 0; v < n; ++v) {
    anchor[v] = v;
    list[v] = {v};
  }
  // First the moves to later places, the last ops first; then the moves to earlier places, the first ops first. The second kind
  // does not undo the first: an op glued after u is the only direct successor of u whenever u is glued before something.
  for (auto v = closure.order.rbegin(); v != closure.order.rend(); ++v) {
    if (moves.glued_before[*v] == kNoOp) continue;
    anchor[*v] = anchor[moves.glued_before[*v]];
    list[anchor[*v]].insert(list[anchor[*v]].begin(), *v);
    list[*v].clear();
  }
  for (const OpId v : closure.order) {
    const OpId u = moves.glued_after[v];
    if (u == kNoOp || anchor[u] == anchor[v]) continue;
    anchor[v] = anchor[u];
    list[anchor[v]].push_back(v);
    list[v].clear();
  }
  Blocks blocks{{}, {}, std::vector<OpId>(n, kNoOp), std::vector<Step>(n, 0)};
  blocks.has_prefix = !moves.prefix.empty();
  if (blocks.has_prefix) append_block(blocks, moves.prefix, moves.prefix[0]);
  for (OpId v = 0; v < n; ++v) {
    if (anchor[v] == v && blocks.block[v] == kNoOp) append_block(blocks, list[v], v);
  }
  return blocks;
}

Blocks singletons(const Graph& graph) {
  const OpId n = graph.num_ops();
  Blocks blocks{{}, {}, std::vector<OpId>(n, kNoOp), std::vector<Step>(n, 0)};
  for (OpId v = 0; v < n; ++v) append_block(blocks, std::span<const OpId>(&v, 1), v);
  return blocks;
}

std::vector<OpId> gather(const Blocks& blocks, std::span<const OpId> order) {
  std::vector<OpId> result;
  result.reserve(order.size());
  if (blocks.has_prefix) result.assign(blocks.members[0].begin(), blocks.members[0].end());
  for (const OpId v : order) {
    const OpId b = blocks.block[v];
    if (blocks.anchor[b] != v || (blocks.has_prefix && b == 0)) continue;
    result.insert(result.end(), blocks.members[b].begin(), blocks.members[b].end());
  }
  return result;
}

}  // namespace olla
