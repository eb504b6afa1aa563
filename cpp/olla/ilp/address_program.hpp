// OLLA's second half: offsets for given lifetimes as a mixed-integer program.
//
// OLLA (arXiv 2210.12924, equations (6)-(8), (15)), for buffers i, j that are alive together at some step:
//
//     A[i]    offset of buffer i, in units: the common divisor of all sizes and fixed offsets
//     b[i,j] = 1  i lies below j, 0: j lies below i                  (6): of OLLA's a and b exactly one is 1 here
//     A[i] + S[i] <= A[j] + (1 - b[i,j]) M,  A[j] + S[j] <= A[i] + b[i,j] M      (7)
//     A[i] + S[i] <= height                                          (8)
//
// Only heights up to a target are described, the best so far at most, and M is what the bounds of A leave: never above the target.
// Left out, not fixed: pairs that are never alive together; addresses of fixed buffers; the variable of a pair whose bounds leave
// one way only (a buffer does not fit below a fixed one), and of twins, which have the same lifetime and size and stand by id; the
// height, where target and lower bound meet.
#pragma once

#include <initializer_list>

#include "olla/ilp/program.hpp"
#include "olla/layout/layout.hpp"

namespace olla {

// Addresses of a program: columns, or constants of fixed buffers, with rows that keep two of them apart.
struct AddressColumns {
  Program& program;
  std::vector<double> size{}, lower{}, upper{};  // of buffer i, in units; its address lies between lower and upper
  std::vector<Column> column{};                  // of buffer i; -1 for a constant

  std::int32_t num_buffers() const { return static_cast<std::int32_t>(size.size()); }
  void add_columns();  // of all buffers; a constant where lower and upper are equal
  bool fits_below(std::int32_t i, std::int32_t j) const { return lower[i] + size[i] <= upper[j]; }

  void below(std::int32_t i, std::int32_t j);                           // i lies below j
  void below_if(std::int32_t i, std::int32_t j, Column b, bool value);  // i lies below j where binary b has the value
  void under(std::int32_t i, Column height, double base);               // i ends at or below base + height

  std::vector<double> decode(std::span<const double> values) const;
  void encode(std::span<const Offset> offsets, Bytes unit, std::vector<double>& values) const;

 private:
  void add_row(std::int32_t i, std::int32_t j, std::initializer_list<Term> extra, double most);
};

// Puts twins in the order of their ids: each takes the lowest key that is left among its twins.
template <class Twins>
void sort_twins(std::vector<double>& keys, Twins twins) {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = i + 1; j < keys.size(); ++j) {
      if (keys[j] < keys[i] && twins(i, j)) std::swap(keys[i], keys[j]);
    }
  }
}

// Offsets that keep the buffers of each overlapping pair in the order of their keys, each as low as those below it allow. The
// height of keys that are offsets of a layout does not rise. fixed: an offset to keep, or kNotInArena; may be empty. O(n^2).
std::vector<Offset> settle(std::span<const Buffer> buffers, std::span<const double> keys, std::span<const Offset> fixed);

// The largest end; kMaxBytes where two buffers that are alive together overlap, or one begins below 0. O(n^2).
Bytes true_height(std::span<const Buffer> buffers, std::span<const Offset> offsets);

// All sizes are positive, all lifetimes non-empty.
class AddressProgram : public TargetProgram {
 public:
  AddressProgram(std::span<const Buffer> buffers, std::span<const Offset> fixed, Bytes lower_bound, Bytes target,
                 std::int64_t max_nonzeros);
  AddressProgram(const AddressProgram&) = delete;

  std::vector<double> encode(std::span<const Offset> offsets) const;  // a layout of height <= target
  std::vector<Offset> decode(std::span<const double> values) const;   // settled: the truth about an answer

 private:
  struct Pair {
    std::int32_t i, j;
    Column b;
  };
  bool free_twins(std::size_t i, std::size_t j) const;
  Outcome find_bounds(double height, std::int64_t max_nonzeros);  // kNoAnswer: some pair fits neither way
  void add_pairs(std::int64_t max_nonzeros);

  std::vector<Buffer> buffers_;
  std::vector<Offset> fixed_;
  std::vector<Pair> overlaps_, pairs_;  // alive together; of these: with a variable
  AddressColumns addresses_{program_};
  Column height_ = -1;  // -1: the height is the target
};

// The greatest common divisor of sizes and fixed offsets: some best layout has all offsets at its multiples.
Bytes common_unit(std::span<const Buffer> buffers, std::span<const Offset> fixed);

// The largest coefficient that floating point handles reliably, and a tolerance that fits the largest one in use.
inline constexpr double kLargestAddress = 0x1p26;
double address_tolerance(double largest);

}  // namespace olla
