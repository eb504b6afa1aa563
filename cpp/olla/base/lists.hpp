// What is done with lists of ids and of edges everywhere: sorted, turned round, put in topological order.
#pragma once

#include <algorithm>
#include <numeric>

#include "olla/base/types.hpp"

namespace olla {

// Every value once, rising.
template <class T>
void sort_unique(std::vector<T>& list) {
  std::ranges::sort(list);
  list.erase(std::unique(list.begin(), list.end()), list.end());
}

// The numbers below count by rising key, the lower first among equals.
template <class Key>
std::vector<std::int32_t> sorted_by(std::size_t count, const Key& key) {
  std::vector<std::int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, {}, key);
  return ids;
}

// List v: what stands in list v of any of them, sorted, unique.
template <class... Lists>
Csr<std::int32_t> united(const Csr<std::int32_t>& first, const Lists&... others) {
  Csr<std::int32_t> result;
  std::vector<std::int32_t> list;
  for (std::int32_t v = 0; v < first.size(); ++v) {
    list.assign(first[v].begin(), first[v].end());
    (list.insert(list.end(), others[v].begin(), others[v].end()), ...);
    sort_unique(list);
    result.push_back(list);
  }
  return result;
}

// List u: the numbers of the lists that hold u, rising. Items are below count. O(count + items).
inline Csr<std::int32_t> transposed(const Csr<std::int32_t>& lists, std::int64_t count) {
  Csr<std::int32_t> result;
  result.offset.assign(static_cast<std::size_t>(count) + 1, 0);
  result.item.resize(lists.item.size());
  for (const std::int32_t u : lists.item) ++result.offset[u + 1];
  std::partial_sum(result.offset.begin(), result.offset.end(), result.offset.begin());
  std::vector<std::int64_t> next = result.offset;
  for (std::int32_t v = 0; v < lists.size(); ++v) {
    for (const std::int32_t u : lists[v]) result.item[next[u]++] = v;
  }
  return result;
}

// All nodes, predecessors first; without those on a cycle and those behind one. O(nodes + edges).
inline std::vector<std::int32_t> topological_order(const Csr<std::int32_t>& preds, const Csr<std::int32_t>& succs) {
  std::vector<std::int32_t> order;
  std::vector<std::size_t> missing(preds.size());
  for (std::int32_t v = 0; v < preds.size(); ++v) {
    missing[v] = preds[v].size();
    if (missing[v] == 0) order.push_back(v);
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (const std::int32_t w : succs[order[i]]) {
      if (--missing[w] == 0) order.push_back(w);
    }
  }
  return order;
}

}  // namespace olla
