#include "olla/graph/closure.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
Closure::Closure(const Csr<OpId>& direct) : before(direct.size(), direct.size()), after(direct.size(), direct.size()) {
  order = topological_order(direct, transposed(direct, direct.size()));
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
  succs = transposed(preds, preds.size());
  for (auto v = order.rbegin(); v != order.rend(); ++v) {
    for (const OpId w : succs[*v]) after.merge(*v, after, w);
    after.set(*v, *v);
  }
}

}  // namespace olla
