#include "olla/graph/paths.hpp"

#include <algorithm>
#include <array>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr Step kBlock = 512;
using Targets = std::array<std::uint64_t, kBlock / 64>;

}  // namespace

std::vector<std::uint8_t> longer_paths(const Graph& graph, std::span<const Edge> pairs, const std::function<bool()>& stop) {
  const OpId n = graph.num_ops();
  Csr<OpId> succs = transposed(graph.preds(), n);
  const std::vector<OpId> order = topological_order(graph.preds(), succs);
  std::vector<Step> place(n);
  for (Step s = 0; s < n; ++s) place[order[s]] = s;
  const auto asked =
      sorted_by(pairs.size(), [&](std::int32_t i) { return std::pair(place[pairs[i].second], -place[pairs[i].first]); });

  std::vector<std::uint8_t> found(pairs.size(), 0);
  std::vector<Targets> reached(n);
  for (std::size_t next = 0; next < asked.size();) {
    if (stop()) return {};
    const Step lo = place[pairs[asked[next]].second] / kBlock * kBlock, hi = std::min(n, lo + kBlock);
    std::size_t end = next;  // of the pairs with a target in this block, by the place of where they begin
    Step first = hi;
    for (; end < asked.size() && place[pairs[asked[end]].second] < hi; ++end)
      first = std::min(first, place[pairs[asked[end]].first]);
    for (Step s = hi - 1; s >= first; --s) {
      Targets& mine = reached[order[s]];
      mine.fill(0);
      for (const OpId w : succs[order[s]]) {
        if (place[w] >= hi) continue;
        for (std::size_t i = 0; i < mine.size(); ++i) mine[i] |= reached[w][i];
        if (place[w] >= lo) mine[(place[w] - lo) / 64] |= std::uint64_t{1} << ((place[w] - lo) % 64);
      }
    }
    for (; next < end; ++next) {
      const auto [u, v] = pairs[asked[next]];
      const Step bit = place[v] - lo;
      found[asked[next]] = std::ranges::any_of(
          succs[u], [&](OpId w) { return w != v && place[w] < place[v] && (reached[w][bit / 64] >> (bit % 64) & 1) != 0; });
    }
  }
  return found;
}

Precedences precedences(const Graph& graph, const std::function<bool()>& stop) {
  Precedences result;
  std::vector<Edge> pairs;  // dependencies that may be implied; then, of tensors of several users, each other one and the candidate
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    if (graph.preds(v).size() < 2) continue;
    for (const OpId u : graph.preds(v)) {
      if (graph.succs(u).size() > 1) pairs.emplace_back(u, v);
    }
  }
  const std::size_t num_edges = pairs.size();
  std::vector<Step> place(graph.num_ops());
  const std::vector<OpId> order = topological_order(graph.preds(), transposed(graph.preds(), graph.num_ops()));
  for (Step s = 0; s < graph.num_ops(); ++s) place[order[s]] = s;
  result.last_user.assign(graph.num_tensors(), kNoOp);
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    const auto users = graph.users(t);
    if (users.empty() || !graph.planned(t)) continue;
    const OpId last = *std::ranges::max_element(users, {}, [&](OpId v) { return place[v]; });
    result.last_user[t] = last;
    for (const OpId u : users) {
      if (u != last && !std::ranges::binary_search(graph.preds(last), u)) pairs.emplace_back(u, last);
    }
  }
  const std::vector<std::uint8_t> found = longer_paths(graph, pairs, stop);
  if (found.size() != pairs.size()) return {};

  std::size_t next = 0;
  std::vector<OpId> kept;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    kept.clear();
    for (const OpId u : graph.preds(v)) {
      const bool asked = next < num_edges && pairs[next] == Edge{u, v};
      if (!asked || found[next] == 0) kept.push_back(u);
      next += asked ? 1 : 0;
    }
    result.preds.push_back(kept);
  }
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    const OpId last = result.last_user[t];
    if (last == kNoOp) continue;
    for (const OpId u : graph.users(t)) {
      if (u == last || std::ranges::binary_search(graph.preds(last), u)) continue;
      if (found[next++] == 0) result.last_user[t] = kNoOp;
    }
  }
  return result;
}

}  // namespace olla
