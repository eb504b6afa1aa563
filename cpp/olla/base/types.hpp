// The vocabulary of the core. Intervals of steps are half-open: [first, last).
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace olla {

using OpId = std::int32_t;      // position of an operator in the graph file
using TensorId = std::int32_t;  // position of a tensor (one storage) in the graph file
using Step = std::int32_t;      // position in an order
using Bytes = std::int64_t;
using Offset = std::int64_t;  // first byte of a tensor in the arena

inline constexpr OpId kNoOp = -1;                   // "no op produces it": the tensor is resident
inline constexpr Offset kNotInArena = -1;           // the tensor keeps its own storage
inline constexpr Bytes kMaxBytes = Bytes{1} << 62;  // sums of sizes stay at or below this

using Edge = std::pair<OpId, OpId>;  // (before, after)

// Lists of varying length, one after the other: list i is item[offset[i], offset[i + 1]).
template <class T>
struct Csr {
  std::vector<std::int64_t> offset{0};
  std::vector<T> item;

  std::int64_t size() const { return static_cast<std::int64_t>(offset.size()) - 1; }
  std::span<const T> operator[](std::int64_t i) const {
    return {item.data() + offset[i], static_cast<std::size_t>(offset[i + 1] - offset[i])};
  }
  void push_back(std::span<const T> list) {
    item.insert(item.end(), list.begin(), list.end());
    offset.push_back(static_cast<std::int64_t>(item.size()));
  }
};

enum class Status : std::uint8_t {
  kOptimal,    // proved: no better answer exists
  kFeasible,   // a limit was reached; bound and gap say how far the answer can be from the best
  kInfeasible  // proved: no answer fits the given capacity
};

}  // namespace olla
