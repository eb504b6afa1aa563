#include "olla/ilp/windows.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr int kMaxRounds = 8;
using Starts = std::vector<std::vector<Step>>;

Csr<OpId> block_preds(const Closure& closure, const Blocks& blocks) {
  Csr<OpId> result;
  std::vector<OpId> list;
  for (OpId b = 0; b < blocks.size(); ++b) {
    list.clear();
    if (blocks.has_prefix && b > 0) list.push_back(0);
    for (const OpId v : blocks.members[b]) {
      for (const OpId u : closure.preds[v]) {
        if (blocks.block[u] != b) list.push_back(blocks.block[u]);
      }
    }
    sort_unique(list);
    result.push_back(list);
  }
  return result;
}

// Every block at every step that leaves room for what must run before and after it.
Starts widest_starts(const Closure& order_of_blocks, const Blocks& blocks, Step num_ops) {
  Starts starts(blocks.size());
  for (OpId b = 0; b < blocks.size(); ++b) {
    Step first = 0, last = num_ops - blocks.length(b);
    for (OpId other = 0; other < blocks.size(); ++other) {
      if (other == b) continue;
      if (order_of_blocks.before.test(b, other)) first += blocks.length(other);
      if (order_of_blocks.after.test(b, other)) last -= blocks.length(other);
    }
    for (Step s = first; s <= last; ++s) starts[b].push_back(s);
  }
  return starts;
}

// A block starts after the first end of each block before it, and ends before the last start of each block after it.
bool propagate(const Closure& order_of_blocks, const Blocks& blocks, Starts& starts) {
  for (const OpId b : order_of_blocks.order) {
    for (const OpId a : order_of_blocks.preds[b]) {
      if (starts[a].empty()) return false;
      const Step first = starts[a].front() + blocks.length(a);
      starts[b].erase(starts[b].begin(), std::lower_bound(starts[b].begin(), starts[b].end(), first));
    }
    if (starts[b].empty()) return false;
  }
  for (auto b = order_of_blocks.order.rbegin(); b != order_of_blocks.order.rend(); ++b) {
    for (const OpId c : order_of_blocks.succs[*b]) {
      const Step last = starts[c].back() - blocks.length(*b);
      starts[*b].erase(std::upper_bound(starts[*b].begin(), starts[*b].end(), last), starts[*b].end());
      if (starts[*b].empty()) return false;
    }
  }
  return true;
}

Spans spans_of(const Blocks& blocks, const Starts& starts) {
  Spans spans;
  for (std::size_t v = 0; v < blocks.block.size(); ++v) {
    spans.earliest.push_back(starts[blocks.block[v]].front() + blocks.offset[v]);
    spans.latest.push_back(starts[blocks.block[v]].back() + blocks.offset[v]);
  }
  return spans;
}

// Drops the starts at which a member of the block would not fit. True if any was dropped.
bool drop_full_steps(const Graph& graph, const Blocks& blocks, const Csr<TensorId>& certain, Bytes target, Starts& starts) {
  const Step n = graph.num_ops();
  const Spans spans = spans_of(blocks, starts);
  std::vector<Lifetime> sure(graph.num_tensors());
  std::vector<Bytes> at_step(n + 1, 0);  // bytes live at that step in every order
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    sure[t] = certain_lifetime(graph, spans, t);
    if (!graph.planned(t) || sure[t].first >= sure[t].last) continue;
    at_step[sure[t].first] += graph.bytes(t);
    at_step[sure[t].last] -= graph.bytes(t);
  }
  for (Step s = 0; s < n; ++s) at_step[s + 1] += at_step[s];

  bool dropped = false;
  std::vector<Bytes> both(n + 1);
  for (OpId b = 0; b < blocks.size(); ++b) {
    for (const OpId v : blocks.members[b]) {
      std::fill(both.begin(), both.end(), 0);  // bytes counted in at_step and in `around`
      Bytes around = graph.resident_bytes() + graph.workspace(v);
      for (const TensorId t : certain[v]) {
        around += graph.bytes(t);
        if (sure[t].first >= sure[t].last) continue;
        both[sure[t].first] += graph.bytes(t);
        both[sure[t].last] -= graph.bytes(t);
      }
      for (Step s = 0; s < n; ++s) both[s + 1] += both[s];
      const auto full = [&](Step start) {
        const Step s = start + blocks.offset[v];
        return around + at_step[s] - both[s] > target;
      };
      dropped = std::erase_if(starts[b], full) > 0 || dropped;
    }
    if (starts[b].empty()) return true;
  }
  return dropped;
}

}  // namespace

std::optional<Windows> find_windows(const Graph& graph, const Closure& closure, const Blocks& blocks, const Csr<TensorId>& certain,
                                    Bytes target) {
  const Closure order_of_blocks(block_preds(closure, blocks));
  Starts starts = widest_starts(order_of_blocks, blocks, graph.num_ops());
  for (int round = 0; round < kMaxRounds; ++round) {
    if (!propagate(order_of_blocks, blocks, starts)) return std::nullopt;
    if (!drop_full_steps(graph, blocks, certain, target, starts)) break;
  }
  if (!propagate(order_of_blocks, blocks, starts)) return std::nullopt;
  Windows result;
  for (const auto& list : starts) result.starts.push_back(list);
  result.preds = order_of_blocks.preds;
  result.spans = spans_of(blocks, starts);
  return result;
}

}  // namespace olla
