// A mixed-integer program as plain arrays: minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper.
#pragma once

#include <algorithm>
#include <cmath>

#include "olla/base/types.hpp"

namespace olla {

using Column = std::int32_t;

struct Term {
  Column column;
  double value;
};

// A column, or a constant where column is -1.
struct Value {
  Column column = -1;
  double constant = 0.0;
};

struct Sum {
  std::vector<Term> terms;
  double constant = 0.0, most = 0.0;  // most: its largest value, of binary columns

  Sum() = default;
  Sum(std::initializer_list<std::pair<Value, double>> values) {
    for (const auto& [value, factor] : values) add(value, factor);
  }

  void add(const Value& value, double factor) {
    if (value.column < 0) {
      constant += factor * value.constant;
      most += factor * value.constant;
    } else {
      terms.push_back({value.column, factor});
      most += std::max(0.0, factor);
    }
  }

  // One term for each column, in their order.
  std::vector<Term> merged() const {
    std::vector<Term> sorted = terms, result;
    std::sort(sorted.begin(), sorted.end(), [](const Term& a, const Term& b) { return a.column < b.column; });
    for (const Term& term : sorted) {
      if (!result.empty() && result.back().column == term.column) {
        result.back().value += term.value;
      } else {
        result.push_back(term);
      }
    }
    return result;
  }
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

// Describes the answers whose value, in bytes, is at most a target. Immutable once it is built.
class TargetProgram {
 public:
  enum class Outcome : std::uint8_t { kBuilt, kNoAnswer, kTooLarge };
  virtual ~TargetProgram() = default;

  Outcome outcome() const { return outcome_; }         // kNoAnswer: proved, no answer has a value <= target
  const Program& program() const { return program_; }  // empty unless kBuilt
  double tolerance() const { return tolerance_; }
  Bytes value_bytes(double objective) const { return base_ + unit_ * std::llround(objective); }  // rounded to the nearest unit
  // Rounded up to a unit, after the tolerance is taken off.
  Bytes bound_bytes(double bound) const {
    return bound > 0.0 ? base_ + unit_ * static_cast<Bytes>(std::ceil(bound - 0.05 - 1e-9 * bound)) : base_;
  }
  Bytes max_rounding_bytes() const { return rounding_; }  // a value exceeds its program's by no more
  bool exact() const { return rounding_ == 0; }

 protected:
  Outcome outcome_ = Outcome::kBuilt;
  Program program_;
  Bytes unit_ = 1, base_ = 0, rounding_ = 0;  // the program counts values in units, from the base on
  double tolerance_ = 1e-6;
};

}  // namespace olla
