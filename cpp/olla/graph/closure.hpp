// All ancestors and descendants of every node of a small acyclic graph, as bit sets. Takes nodes^2 / 4 bytes: not for large graphs.
#pragma once

#include "olla/base/types.hpp"

namespace olla {

class BitMatrix {
 public:
  BitMatrix(std::int64_t rows, std::int64_t columns)
      : words_(static_cast<std::size_t>((columns + 63) / 64)), bits_(static_cast<std::size_t>(rows) * words_, 0) {}

  bool test(std::int64_t row, std::int64_t column) const { return (bits_[word(row, column)] >> (column & 63) & 1) != 0; }
  void set(std::int64_t row, std::int64_t column) { bits_[word(row, column)] |= std::uint64_t{1} << (column & 63); }
  void merge(std::int64_t row, const BitMatrix& other, std::int64_t other_row) {  // row |= other_row
    for (std::size_t w = 0; w < words_; ++w) bits_[word(row, 0) + w] |= other.bits_[other.word(other_row, 0) + w];
  }
  void fill(std::int64_t row) {
    for (std::size_t w = 0; w < words_; ++w) bits_[word(row, 0) + w] = ~std::uint64_t{0};
  }

 private:
  std::size_t word(std::int64_t row, std::int64_t column) const {
    return static_cast<std::size_t>(row) * words_ + static_cast<std::size_t>(column >> 6);
  }
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

struct Closure {
  std::vector<OpId> order;  // topological
  BitMatrix before;         // before.test(v, u): u == v or u must precede v
  BitMatrix after;          // after.test(v, w): w == v or w must follow v
  Csr<OpId> preds, succs;   // the direct edges that no longer path implies

  // preds[v]: direct predecessors of v; must be acyclic. O(edges * nodes / 64).
  explicit Closure(const Csr<OpId>& preds);

  bool comparable(OpId u, OpId v) const { return before.test(u, v) || before.test(v, u); }
};

}  // namespace olla
