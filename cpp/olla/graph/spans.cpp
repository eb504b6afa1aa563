#include "olla/graph/spans.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "olla/graph/schedule.hpp"

namespace olla {
namespace {

constexpr std::size_t kWords = 8;  // columns per sweep: 8 * 64
using Block = std::array<std::uint64_t, kWords>;

// Of every op: how many others reach it through `before`. order lists the ops so that before(v) stand earlier than v.
template <class Before>
std::vector<Step> count_reaching(std::span<const OpId> order, Before before) {
  const Step n = static_cast<Step>(order.size());
  constexpr Step kColumns = kWords * 64;
  std::vector<Step> count(n, 0);
  std::vector<Block> reached(n, Block{});  // bit j of op v: order[column + j] reaches v, or is v
  for (Step column = 0; column < n; column += kColumns) {
    const Step end = std::min<Step>(n, column + kColumns);
    for (Step i = column; i < n; ++i) {  // nothing inside the block reaches an op before it
      const OpId v = order[i];
      Block bits{};
      for (const OpId u : before(v)) {
        for (std::size_t w = 0; w < kWords; ++w) bits[w] |= reached[u][w];
      }
      for (const std::uint64_t word : bits) count[v] += std::popcount(word);
      if (i < end) bits[static_cast<std::size_t>(i - column) / 64] |= std::uint64_t{1} << ((i - column) % 64);
      reached[v] = bits;
    }
    for (Step i = column; i < end; ++i) reached[order[i]] = Block{};
  }
  return count;
}

// The lifetime of t if each op v runs at step born[v] as its producer, and at step used[v] as a user.
Lifetime lifetime(const Graph& graph, std::span<const Step> born, std::span<const Step> used, TensorId t) {
  const OpId producer = graph.producer(t);
  Lifetime result = producer == kNoOp ? Lifetime{0, 0} : Lifetime{born[producer], used[producer] + 1};
  for (const OpId v : graph.users(t)) result.last = std::max(result.last, used[v] + 1);
  if (!graph.planned(t) || graph.output(t)) result.last = graph.num_ops();
  return result;
}

}  // namespace

Spans spans(const Graph& graph) {
  std::vector<OpId> order(graph.num_ops());
  std::iota(order.begin(), order.end(), 0);
  order = nearest_order(graph, order);
  Spans result;
  result.earliest = count_reaching(order, [&](OpId v) { return graph.preds(v); });
  std::reverse(order.begin(), order.end());
  result.latest = count_reaching(order, [&](OpId v) { return graph.succs(v); });
  for (Step& step : result.latest) step = graph.num_ops() - 1 - step;
  return result;
}

Lifetime widest_lifetime(const Graph& graph, const Spans& spans, TensorId t) {
  return lifetime(graph, spans.earliest, spans.latest, t);
}

Lifetime certain_lifetime(const Graph& graph, const Spans& spans, TensorId t) {
  return lifetime(graph, spans.latest, spans.earliest, t);
}

}  // namespace olla
