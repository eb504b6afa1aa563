#include "olla/graph/closure.hpp"

#include <algorithm>

namespace olla {
namespace {

Csr<OpId> reversed(const Csr<OpId>& lists) {
  Csr<OpId> result;
  result.offset.assign(lists.offset.size(), 0);
  result.item.resize(lists.item.size());
  for (const OpId u : lists.item) ++result.offset[u + 1];
  for (std::int64_t v = 0; v < lists.size(); ++v) result.offset[v + 1] += result.offset[v];
  std::vector<std::int64_t> next(result.offset.begin(), result.offset.end() - 1);
  for (OpId v = 0; v < lists.size(); ++v) {
    for (const OpId u : lists[v]) result.item[next[u]++] = v;
  }
  return result;
}

std::vector<OpId> topological_order(const Csr<OpId>& preds, const Csr<OpId>& succs) {
  std::vector<OpId> order;
  std::vector<std::size_t> missing(preds.size());
  for (OpId v = 0; v < preds.size(); ++v) {
    missing[v] = preds[v].size();
    if (missing[v] == 0) order.push_back(v);
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (const OpId w : succs[order[i]]) {
      if (--missing[w] == 0) order.push_back(w);
    }
  }
  return order;
}

}  // namespace

Closure::Closure(const Csr<OpId>& direct) : before(direct.size(), direct.size()), after(direct.size(), direct.size()) {
  const Csr<OpId> direct_succs = reversed(direct);
  order = topological_order(direct, direct_succs);
  std::vector<std::int32_t> place(direct.size());
  for (std::size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<std::int32_t>(i);
  std::vector<std::vector<OpId>> kept(direct.size());
  std::vector<OpId> candidates;
  for (const OpId v : order) {
    // Latest first: an edge is implied exactly if its start was reached through one that stands later.
    candidates.assign(direct[v].begin(), direct[v].end());
    std::sort(candidates.begin(), candidates.end(), [&](OpId a, OpId b) { return place[a] > place[b]; });
    for (const OpId u : candidates) {
      if (before.test(v, u)) continue;
      kept[v].push_back(u);
      before.merge(v, before, u);
    }
    std::sort(kept[v].begin(), kept[v].end());
    before.set(v, v);
  }
  for (const auto& list : kept) preds.push_back(list);
  succs = reversed(preds);
  for (auto v = order.rbegin(); v != order.rend(); ++v) {
    for (const OpId w : succs[*v]) after.merge(*v, after, w);
    after.set(*v, *v);
  }
}

}  // namespace olla
