#include "olla/ilp/address_program.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr int kMaxRounds = 8;

bool together(const Buffer& a, const Buffer& b) { return a.lower < b.upper && b.lower < a.upper; }

}  // namespace

void AddressColumns::add_columns() {
  for (std::size_t i = 0; i < size.size(); ++i) {
    column.push_back(lower[i] == upper[i] ? -1 : program.add_column(0.0, lower[i], upper[i], false));
  }
}

void AddressColumns::below(std::int32_t i, std::int32_t j) {
  if (upper[i] + size[i] > lower[j]) add_row(i, j, {}, -size[i]);
}

void AddressColumns::below_if(std::int32_t i, std::int32_t j, Column b, bool value) {
  const double most = upper[i] + size[i] - lower[j];  // M
  if (most > 0.0) add_row(i, j, {{b, value ? most : -most}}, (value ? most : 0.0) - size[i]);
}

// A[i] - A[j] + extra <= most.
void AddressColumns::add_row(std::int32_t i, std::int32_t j, std::initializer_list<Term> extra, double most) {
  Sum sum;
  sum.add({column[i], lower[i]}, 1.0);
  sum.add({column[j], lower[j]}, -1.0);
  sum.terms.insert(sum.terms.end(), extra);
  program.add_row(-Program::kInfinity, most - sum.constant, sum.terms);
}

void AddressColumns::under(std::int32_t i, Column height, double base) {
  const double most = base - size[i];
  if (column[i] < 0) {
    program.lower[height] = std::max(program.lower[height], lower[i] - most);
  } else {
    const Term terms[] = {{column[i], 1.0}, {height, -1.0}};
    program.add_row(-Program::kInfinity, most, terms);
  }
}

std::vector<double> AddressColumns::decode(std::span<const double> values) const {
  std::vector<double> addresses = lower;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (column[i] >= 0) addresses[i] = values[column[i]];
  }
  return addresses;
}

void AddressColumns::encode(std::span<const Offset> offsets, Bytes unit, std::vector<double>& values) const {
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (column[i] >= 0) values[column[i]] = static_cast<double>(offsets[i] / unit);
  }
}

std::vector<Offset> settle(std::span<const Buffer> buffers, std::span<const double> keys, std::span<const Offset> fixed) {
  const std::vector<std::int32_t> order = sorted_by(buffers.size(), [&](std::int32_t i) { return keys[i]; });
  std::vector<Offset> offsets(buffers.size(), 0);
  for (std::size_t k = 0; k < order.size(); ++k) {
    const std::int32_t i = order[k];
    if (!fixed.empty() && fixed[i] != kNotInArena) {
      offsets[i] = fixed[i];
      continue;
    }
    for (std::size_t l = 0; l < k; ++l) {
      const std::int32_t j = order[l];
      if (together(buffers[i], buffers[j])) offsets[i] = std::max(offsets[i], offsets[j] + buffers[j].size);
    }
  }
  return offsets;
}

Bytes true_height(std::span<const Buffer> buffers, std::span<const Offset> offsets) {
  Bytes height = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Offset end = offsets[i] + buffers[i].size;
    height = std::max(height, end);
    if (offsets[i] < 0) return kMaxBytes;
    for (std::size_t j = 0; j < i; ++j) {
      const bool apart = end <= offsets[j] || offsets[j] + buffers[j].size <= offsets[i];
      if (!apart && together(buffers[i], buffers[j])) return kMaxBytes;
    }
  }
  return height;
}

Bytes common_unit(std::span<const Buffer> buffers, std::span<const Offset> fixed) {
  Bytes unit = 0;
  for (const Buffer& buffer : buffers) unit = std::gcd(unit, buffer.size);
  for (const Offset offset : fixed) {
    if (offset != kNotInArena) unit = std::gcd(unit, offset);
  }
  return std::max<Bytes>(unit, 1);
}

double address_tolerance(double largest) { return std::clamp(0.05 / std::max(largest, 1.0), 1e-9, 1e-6); }

AddressProgram::AddressProgram(std::span<const Buffer> buffers, std::span<const Offset> fixed, Bytes lower_bound, Bytes target,
                               std::int64_t max_nonzeros)
    : buffers_(buffers.begin(), buffers.end()), fixed_(fixed.begin(), fixed.end()) {
  unit_ = common_unit(buffers, fixed);
  fixed_.resize(buffers_.size(), kNotInArena);
  const double height = static_cast<double>(target / unit_);
  if (height > kLargestAddress) {
    outcome_ = Outcome::kTooLarge;
    return;
  }
  tolerance_ = address_tolerance(height);
  base_ = (lower_bound + unit_ - 1) / unit_ * unit_;
  outcome_ = base_ > target ? Outcome::kNoAnswer : find_bounds(height, max_nonzeros);
  if (outcome_ != Outcome::kBuilt) return;
  addresses_.add_columns();
  add_pairs(max_nonzeros);
  if (outcome_ == Outcome::kTooLarge || base_ / unit_ == target / unit_) return;
  const auto base = static_cast<double>(base_ / unit_);
  height_ = program_.add_column(1.0, 0.0, height - base, false);
  for (std::int32_t i = 0; i < addresses_.num_buffers(); ++i) addresses_.under(i, height_, base);
}

bool AddressProgram::free_twins(std::size_t i, std::size_t j) const {
  const Buffer &a = buffers_[i], &b = buffers_[j];
  const bool free = fixed_[i] == kNotInArena && fixed_[j] == kNotInArena;
  return free && a.lower == b.lower && a.upper == b.upper && a.size == b.size;
}

// A pair that fits one way only moves the bounds of both; that can decide further pairs.
AddressProgram::Outcome AddressProgram::find_bounds(double height, std::int64_t max_nonzeros) {
  auto& [program, size, lower, upper, column] = addresses_;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(buffers_.size()); ++i) {
    size.push_back(static_cast<double>(buffers_[i].size / unit_));
    const bool is_fixed = fixed_[i] != kNotInArena;
    lower.push_back(is_fixed ? static_cast<double>(fixed_[i] / unit_) : 0.0);
    upper.push_back(is_fixed ? lower[i] : height - size[i]);
    if (lower[i] > height - size[i]) return Outcome::kNoAnswer;
    if (std::ssize(overlaps_) > max_nonzeros / 2) return Outcome::kTooLarge;
    for (std::int32_t j = 0; j < i; ++j) {
      const bool both_fixed = is_fixed && fixed_[j] != kNotInArena;
      if (!both_fixed && together(buffers_[i], buffers_[j])) overlaps_.push_back({j, i, -1});
    }
  }
  bool changed = true;
  for (int round = 0; round < kMaxRounds && changed; ++round) {
    changed = false;
    for (const auto& [i, j, b] : overlaps_) {
      const bool up = addresses_.fits_below(i, j), down = addresses_.fits_below(j, i);
      if (!up && !down) return Outcome::kNoAnswer;
      if (up && down) continue;
      const std::int32_t below = up ? i : j, above = up ? j : i;
      changed |= lower[above] < lower[below] + size[below] || upper[below] > upper[above] - size[below];
      lower[above] = std::max(lower[above], lower[below] + size[below]);
      upper[below] = std::min(upper[below], upper[above] - size[below]);
      if (lower[above] > upper[above] || lower[below] > upper[below]) return Outcome::kNoAnswer;
    }
  }
  return Outcome::kBuilt;
}

void AddressProgram::add_pairs(std::int64_t max_nonzeros) {
  for (const auto& [i, j, none] : overlaps_) {
    const bool up = addresses_.fits_below(i, j), down = addresses_.fits_below(j, i);
    if (free_twins(i, j) || !down) {
      addresses_.below(i, j);
    } else if (!up) {
      addresses_.below(j, i);
    } else {
      const Column b = program_.add_column(0.0, 0.0, 1.0, true);
      addresses_.below_if(i, j, b, true);
      addresses_.below_if(j, i, b, false);
      pairs_.push_back({i, j, b});
    }
    if (program_.num_nonzeros() > max_nonzeros) {
      program_ = {};
      outcome_ = Outcome::kTooLarge;
      return;
    }
  }
}

std::vector<double> AddressProgram::encode(std::span<const Offset> offsets) const {
  std::vector<double> keys(offsets.begin(), offsets.end());
  sort_twins(keys, [this](std::size_t i, std::size_t j) { return free_twins(i, j); });
  const std::vector<Offset> settled = settle(buffers_, keys, fixed_);
  std::vector<double> values(program_.num_columns(), 0.0);
  addresses_.encode(settled, unit_, values);
  for (const auto& [i, j, b] : pairs_) values[b] = settled[i] < settled[j] ? 1.0 : 0.0;
  if (height_ < 0) return values;
  Bytes height = base_;
  for (std::size_t i = 0; i < settled.size(); ++i) height = std::max(height, settled[i] + buffers_[i].size);
  values[height_] = static_cast<double>((height - base_) / unit_);
  return values;
}

std::vector<Offset> AddressProgram::decode(std::span<const double> values) const {
  return settle(buffers_, addresses_.decode(values), fixed_);
}

}  // namespace olla
