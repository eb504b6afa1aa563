#include "olla/graph/graph.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

std::string list_of(std::span<const std::int64_t> ids, const char* separator) {
  constexpr std::size_t kShown = 12;
  std::string text;
  for (std::size_t i = 0; i < std::min(ids.size(), kShown); ++i) {
    if (i > 0) text += separator;
    text += std::to_string(ids[i]);
  }
  if (ids.size() > kShown) text += std::string(separator) + "... (" + std::to_string(ids.size()) + " in all)";
  return text;
}

std::string known(const char* kind, std::int64_t limit) {
  if (limit == 0) return std::string("but the graph has no ") + kind + "s";
  return std::string("but the graph has ") + kind + "s 0 to " + std::to_string(limit - 1);
}

// Which of the offsets of lists does not fit, in words.
std::string wrong_offset(const Csr<std::int32_t>& lists) {
  const auto& offset = lists.offset;
  if (offset.empty()) return "there are none";
  if (offset.front() != 0) return "offset[0] is " + std::to_string(offset.front());
  const auto fall = std::is_sorted_until(offset.begin(), offset.end());
  const std::string place = "offset[" + std::to_string(fall - offset.begin() - (fall == offset.end() ? 1 : 0)) + "] is ";
  if (fall != offset.end()) return place + std::to_string(*fall) + " after " + std::to_string(*std::prev(fall));
  return place + std::to_string(offset.back()) + ", the last of " + std::to_string(offset.size());
}

// list_of_op: "reads"; kind: what the ids stand for, "tensor" or "op".
void check_lists(const char* list_of_op, const Csr<std::int32_t>& lists, std::int64_t num_ops, const char* kind,
                 std::int64_t limit) {
  const auto& offset = lists.offset;
  if (lists.size() != num_ops || offset.front() != 0 || offset.back() != static_cast<std::int64_t>(lists.item.size()) ||
      !std::is_sorted(offset.begin(), offset.end())) {
    throw GraphError(std::string(list_of_op) + ": the offsets must rise from 0 to the number of items (" +
                         std::to_string(lists.item.size()) + "), with one list for each of the " + std::to_string(num_ops) +
                         " ops, but " + wrong_offset(lists),
                     "lengths", {});
  }
  for (std::int64_t v = 0; v < num_ops; ++v) {
    for (std::int64_t i = offset[v]; i < offset[v + 1]; ++i) {
      const std::int32_t id = lists.item[i];
      if (id >= 0 && id < limit) continue;
      throw GraphError("ops[" + std::to_string(v) + "]." + list_of_op + "[" + std::to_string(i - offset[v]) + "] is " +
                           std::to_string(id) + ", " + known(kind, limit),
                       "ids", {v, id});
    }
  }
}

void check_count(const char* what, std::size_t seen, std::size_t expected) {
  if (seen == expected) return;
  throw GraphError(std::string(what) + " has " + std::to_string(seen) + " entries, expected " + std::to_string(expected), "lengths",
                   {});
}

void check_numbers(std::size_t num_ops, std::size_t num_tensors) {
  constexpr std::size_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  if (num_ops <= kMost && num_tensors <= kMost) return;
  throw GraphError(std::to_string(num_ops) + " ops and " + std::to_string(num_tensors) + " tensors are too many: ids have 31 bits",
                   "lengths", {});
}

void check_sizes(const char* list, const char* field, std::span<const Bytes> sizes, Bytes& sum) {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t id = static_cast<std::int64_t>(i);
    if (sizes[i] >= 0 && sizes[i] <= kMaxBytes - sum) {
      sum += sizes[i];
      continue;
    }
    const std::string seen = std::string(list) + "[" + std::to_string(i) + "]." + field + " is " + std::to_string(sizes[i]);
    if (sizes[i] < 0) throw GraphError(seen + ", expected 0 or more", "sizes", {id});
    throw GraphError(seen + ": the sum of all sizes passes 2^62 bytes there", "sizes", {id});
  }
}

}  // namespace

Graph::Graph(GraphData data) : data_(std::move(data)) {
  check_numbers(data_.workspace_bytes.size(), data_.tensor_bytes.size());
  check_count("donated", data_.donated.size(), data_.tensor_bytes.size());
  check_count("random", data_.random.size(), data_.workspace_bytes.size());
  check_lists("reads", data_.reads, num_ops(), "tensor", num_tensors());
  check_lists("writes", data_.writes, num_ops(), "tensor", num_tensors());
  check_lists("mutates", data_.mutates, num_ops(), "tensor", num_tensors());
  check_lists("after", data_.after, num_ops(), "op", num_ops());
  for (std::size_t i = 0; i < data_.outputs.size(); ++i) {
    const TensorId t = data_.outputs[i];
    if (t >= 0 && t < num_tensors()) continue;
    throw GraphError("outputs[" + std::to_string(i) + "] is " + std::to_string(t) + ", " + known("tensor", num_tensors()), "ids",
                     {t});
  }
  Bytes sum = 0;
  check_sizes("tensors", "bytes", data_.tensor_bytes, sum);
  check_sizes("ops", "workspace_bytes", data_.workspace_bytes, sum);
  derive_tensors();
  derive_dependencies();
}

Graph Graph::with_edges(std::span<const Edge> extra) const {
  std::vector<Edge> edges;
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const OpId u : preds(v)) edges.emplace_back(u, v);
  }
  for (const auto& [before, after] : extra) {
    for (const OpId v : {before, after}) {
      if (v >= 0 && v < num_ops()) continue;
      throw GraphError("an extra precedence names op " + std::to_string(v) + ", " + known("op", num_ops()), "ids", {v});
    }
    edges.emplace_back(before, after);
  }
  Graph result = *this;
  result.set_edges(std::move(edges));
  return result;
}

Graph Graph::constrained(std::span<const Edge> extra) const {
  Graph result = with_edges(extra);
  result.reject_cycle();
  return result;
}

std::optional<Graph> Graph::constrained_if_acyclic(std::span<const Edge> extra) const {
  Graph result = with_edges(extra);
  if (!result.find_cycle().empty()) return std::nullopt;
  return result;
}

void Graph::derive_tensors() {
  producer_.assign(num_tensors(), kNoOp);
  output_.assign(num_tensors(), 0);
  new_bytes_.assign(num_ops(), 0);
  for (const TensorId t : data_.outputs) output_[t] = 1;

  writes_ = united(data_.writes);
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const TensorId t : writes(v)) {
      if (producer_[t] != kNoOp) {
        throw GraphError("tensor " + std::to_string(t) + " is written by op " + std::to_string(producer_[t]) + " and by op " +
                             std::to_string(v) + ": one writer is allowed, later changes are mutations",
                         "two_writers", {t, producer_[t], v});
      }
      if (donated(t)) {
        throw GraphError("tensor " + std::to_string(t) + " is donated and written by op " + std::to_string(v) +
                             ": only tensors that no op writes can be donated",
                         "writes_donated", {t, v});
      }
      producer_[t] = v;
      new_bytes_[v] += bytes(t);
    }
  }
  uses_ = united(data_.reads, data_.mutates);
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const TensorId t : uses(v)) {
      if (producer_[t] != v) continue;
      throw GraphError("cycle: op " + std::to_string(v) + " uses tensor " + std::to_string(t) +
                           ", which it writes itself: take it out of what op " + std::to_string(v) +
                           " reads and mutates, or give the result a tensor of its own",
                       "cycle", {v});
    }
  }
  users_ = transposed(uses_, num_tensors());
  for (TensorId t = 0; t < num_tensors(); ++t) {
    if (!planned(t)) resident_bytes_ += bytes(t);
  }
}

void Graph::derive_dependencies() {
  const Csr<TensorId> mutates = united(data_.mutates);
  std::vector<Edge> edges;
  for (TensorId t = 0; t < num_tensors(); ++t) {
    OpId mutator = kNoOp;       // the last mutation so far, in program order
    std::vector<OpId> readers;  // uses since then
    for (const OpId v : users(t)) {
      if (producer_[t] != kNoOp) edges.emplace_back(producer_[t], v);
      if (mutator != kNoOp) edges.emplace_back(mutator, v);
      if (std::ranges::binary_search(mutates[v], t)) {
        for (const OpId u : readers) edges.emplace_back(u, v);
        readers.clear();
        mutator = v;
      } else {
        readers.push_back(v);
      }
    }
  }
  OpId last_random = kNoOp;
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const OpId u : data_.after[v]) edges.emplace_back(u, v);
    if (data_.random[v] == 0) continue;
    if (last_random != kNoOp) edges.emplace_back(last_random, v);
    last_random = v;
  }
  set_edges(std::move(edges));
  reject_cycle();
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const OpId u : preds(v)) {
      if (u > v) {
        throw GraphError("the program order breaks a dependency: op " + std::to_string(v) + " needs op " + std::to_string(u) +
                             ", which stands later: number the ops in an order in which they can run",
                         "program_order", {u, v});
      }
    }
  }
}

void Graph::set_edges(std::vector<Edge> edges) {
  sort_unique(edges);
  succs_ = {};
  auto edge = edges.begin();
  for (OpId v = 0; v < num_ops(); ++v) {
    for (; edge != edges.end() && edge->first == v; ++edge) succs_.item.push_back(edge->second);
    succs_.offset.push_back(std::ssize(succs_.item));
  }
  preds_ = transposed(succs_, num_ops());
}

std::vector<std::int64_t> Graph::find_cycle() const {
  const std::vector<OpId> order = topological_order(preds_, succs_);
  if (order.size() == static_cast<std::size_t>(num_ops())) return {};
  std::vector<std::uint8_t> is_left(num_ops(), 1);
  for (const OpId v : order) is_left[v] = 0;

  // Every op left has a predecessor left: walking back must come round.
  OpId v = static_cast<OpId>(std::ranges::find(is_left, 1) - is_left.begin());
  std::vector<std::int64_t> path;
  std::vector<std::int64_t> position(num_ops(), -1);
  while (position[v] < 0) {
    position[v] = static_cast<std::int64_t>(path.size());
    path.push_back(v);
    v = *std::ranges::find_if(preds(v), [&](OpId u) { return is_left[u] != 0; });
  }
  path.erase(path.begin(), path.begin() + position[v]);
  std::reverse(path.begin(), path.end());
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  return path;
}

void Graph::reject_cycle() const {
  const std::vector<std::int64_t> path = find_cycle();
  if (path.empty()) return;
  throw GraphError("cycle: each of these ops must run before the next and the last before the first: " + list_of(path, " -> "),
                   "cycle", path);
}

bool Graph::is_order(std::span<const OpId> order) const {
  if (order.size() != static_cast<std::size_t>(num_ops())) return false;
  std::vector<Step> step(num_ops(), -1);
  for (std::size_t s = 0; s < order.size(); ++s) {
    if (order[s] < 0 || order[s] >= num_ops() || step[order[s]] >= 0) return false;
    step[order[s]] = static_cast<Step>(s);
  }
  for (OpId v = 0; v < num_ops(); ++v) {
    for (const OpId u : preds(v)) {
      if (step[u] > step[v]) return false;
    }
  }
  return true;
}

}  // namespace olla
