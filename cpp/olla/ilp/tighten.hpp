// Precedences, beyond the dependencies, that all orders whose peak stays within a target have in common.
#pragma once

#include <functional>
#include <optional>

#include "olla/graph/closure.hpp"
#include "olla/graph/graph.hpp"

namespace olla {

// certain[v]: the tensors live while op v runs in every order. O(ops * tensors).
Csr<TensorId> certain_tensors(const Graph& graph, const Closure& closure);

// The most bytes that are certainly live during one op: a lower bound of the peak.
Bytes certain_peak(const Graph& graph, const Csr<TensorId>& certain);

// The graph with every precedence u -> v for which "v before u" would make more than target bytes certainly live during u or v.
// It has all orders with peak <= target, and they only have the precedences found; nullopt: there is no such order.
// O(rounds * ops^2 * tensors that can be live at once); stops searching when stop() is true.
std::optional<Graph> tighten(const Graph& graph, Bytes target, const std::function<bool()>& stop);

}  // namespace olla
