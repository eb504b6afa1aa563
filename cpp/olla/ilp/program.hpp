// A mixed-integer program as plain arrays: minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper.
#pragma once

#include "olla/base/types.hpp"

namespace olla {

using Column = std::int32_t;

struct Term {
  Column column;
  double value;
};

struct Program {
  std::vector<double> cost, lower, upper;
  std::vector<std::int32_t> integer;  // of column j: 1 if it must be integral
  std::vector<double> row_lower, row_upper;
  std::vector<std::int32_t> row_start{0};  // row i is [row_start[i], row_start[i + 1]) of index and value
  std::vector<Column> index;
  std::vector<double> value;

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  Column num_columns() const { return static_cast<Column>(cost.size()); }
  std::int32_t num_rows() const { return static_cast<std::int32_t>(row_lower.size()); }
  std::int64_t num_nonzeros() const { return static_cast<std::int64_t>(index.size()); }

  Column add_column(double column_cost, double from, double to, bool integral) {
    cost.push_back(column_cost);
    lower.push_back(from);
    upper.push_back(to);
    integer.push_back(integral ? 1 : 0);
    return num_columns() - 1;
  }

  void add_row(double from, double to, std::span<const Term> terms) {
    for (const Term& term : terms) {
      index.push_back(term.column);
      value.push_back(term.value);
    }
    row_start.push_back(static_cast<std::int32_t>(index.size()));
    row_lower.push_back(from);
    row_upper.push_back(to);
  }
};

}  // namespace olla
