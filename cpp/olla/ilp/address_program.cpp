#include "olla/ilp/address_program.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace olla {
namespace {

constexpr int kMaxRounds = 8;

bool together(const Buffer& a, const Buffer& b) { return a.lower < b.upper && b.lower < a.upper; }

bool twins(const Buffer& a, const Buffer& b) { return a.lower == b.lower && a.upper == b.upper && a.size == b.size; }

}  // namespace

void AddressColumns::add(double lower, double upper) {
  columns_.push_back(lower == upper ? -1 : program_.add_column(0.0, lower, upper, false));
  lower_.push_back(lower);
  upper_.push_back(upper);
}

void AddressColumns::below(std::int32_t i, std::int32_t j) {
  if (upper_[i] + sizes_[i] > lower_[j]) add_row(i, j, -sizes_[i], nullptr);
}

void AddressColumns::below_if(std::int32_t i, std::int32_t j, Column b, bool value) {
  const double most = upper_[i] + sizes_[i] - lower_[j];  // M
  if (most <= 0.0) return;
  const Term term{b, value ? most : -most};
  add_row(i, j, (value ? most : 0.0) - sizes_[i], &term);
}

// A[i] - A[j] + extra <= upper.
void AddressColumns::add_row(std::int32_t i, std::int32_t j, double upper, const Term* extra) {
  std::vector<Term> terms;
  for (const auto& [item, sign] : {std::pair(i, 1.0), std::pair(j, -1.0)}) {
    if (columns_[item] >= 0) terms.push_back({columns_[item], sign});
    if (columns_[item] < 0) upper -= sign * lower_[item];
  }
  if (extra != nullptr) terms.push_back(*extra);
  program_.add_row(-Program::kInfinity, upper, terms);
}

void AddressColumns::under(std::int32_t i, Column height, double base) {
  const double upper = base - sizes_[i];
  if (columns_[i] < 0) {
    program_.lower[height] = std::max(program_.lower[height], lower_[i] - upper);
  } else {
    const Term terms[] = {{columns_[i], 1.0}, {height, -1.0}};
    program_.add_row(-Program::kInfinity, upper, terms);
  }
}

std::vector<Offset> settle(std::span<const Buffer> buffers, std::span<const double> keys, std::span<const Offset> fixed) {
  std::vector<std::int32_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::int32_t i) { return keys[i]; });
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
    : buffers_(buffers.begin(), buffers.end()), fixed_(fixed.begin(), fixed.end()), unit_(common_unit(buffers, fixed)) {
  fixed_.resize(buffers_.size(), kNotInArena);
  const double height = static_cast<double>(target / unit_);
  if (height > kLargestAddress) {
    outcome_ = Outcome::kTooLarge;
    return;
  }
  tolerance_ = address_tolerance(height);
  base_ = (lower_bound + unit_ - 1) / unit_ * unit_;
  outcome_ = base_ > target ? Outcome::kNoLayout : find_bounds(height, max_nonzeros);
  if (outcome_ != Outcome::kBuilt) return;
  AddressColumns addresses(program_, sizes_);
  for (std::size_t i = 0; i < buffers_.size(); ++i) addresses.add(lower_[i], upper_[i]);
  for (std::size_t i = 0; i < buffers_.size(); ++i) columns_.push_back(addresses.column(static_cast<std::int32_t>(i)));
  add_pairs(addresses, max_nonzeros);
  if (outcome_ == Outcome::kTooLarge || base_ / unit_ == target / unit_) return;
  height_ = program_.add_column(1.0, 0.0, height - static_cast<double>(base_ / unit_), false);
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    addresses.under(static_cast<std::int32_t>(i), height_, static_cast<double>(base_ / unit_));
  }
}

// A pair that fits one way only moves the bounds of both; that can decide further pairs.
AddressProgram::Outcome AddressProgram::find_bounds(double height, std::int64_t max_nonzeros) {
  const auto n = static_cast<std::int32_t>(buffers_.size());
  for (std::int32_t i = 0; i < n; ++i) {
    sizes_.push_back(static_cast<double>(buffers_[i].size / unit_));
    const bool is_fixed = fixed_[i] != kNotInArena;
    lower_.push_back(is_fixed ? static_cast<double>(fixed_[i] / unit_) : 0.0);
    upper_.push_back(is_fixed ? lower_[i] : height - sizes_[i]);
    if (lower_[i] > height - sizes_[i]) return Outcome::kNoLayout;
    if (std::ssize(overlaps_) > max_nonzeros / 2) return Outcome::kTooLarge;
    for (std::int32_t j = 0; j < i; ++j) {
      const bool both_fixed = is_fixed && fixed_[j] != kNotInArena;
      if (!both_fixed && together(buffers_[i], buffers_[j])) overlaps_.push_back({j, i, -1});
    }
  }
  const auto fits = [&](std::int32_t i, std::int32_t j) { return lower_[i] + sizes_[i] <= upper_[j]; };
  bool changed = true;
  for (int round = 0; round < kMaxRounds && changed; ++round) {
    changed = false;
    for (const auto& [i, j, b] : overlaps_) {
      const bool up = fits(i, j), down = fits(j, i);
      if (!up && !down) return Outcome::kNoLayout;
      if (up && down) continue;
      const std::int32_t below = up ? i : j, above = up ? j : i;
      changed |= lower_[above] < lower_[below] + sizes_[below] || upper_[below] > upper_[above] - sizes_[below];
      lower_[above] = std::max(lower_[above], lower_[below] + sizes_[below]);
      upper_[below] = std::min(upper_[below], upper_[above] - sizes_[below]);
      if (lower_[above] > upper_[above] || lower_[below] > upper_[below]) return Outcome::kNoLayout;
    }
  }
  return Outcome::kBuilt;
}

void AddressProgram::add_pairs(AddressColumns& addresses, std::int64_t max_nonzeros) {
  for (const auto& [i, j, none] : overlaps_) {
    const bool up = addresses.fits_below(i, j), down = addresses.fits_below(j, i);
    const bool are_twins = fixed_[i] == kNotInArena && fixed_[j] == kNotInArena && twins(buffers_[i], buffers_[j]);
    if (are_twins || !down) {
      addresses.below(i, j);
    } else if (!up) {
      addresses.below(j, i);
    } else {
      const Column b = program_.add_column(0.0, 0.0, 1.0, true);
      addresses.below_if(i, j, b, true);
      addresses.below_if(j, i, b, false);
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
  const auto n = static_cast<std::int32_t>(buffers_.size());
  std::vector<double> keys(offsets.begin(), offsets.end());
  for (std::int32_t i = 0; i < n; ++i) {  // twins stand by id: each takes the lowest of the places of those still to come
    for (std::int32_t j = i + 1; j < n; ++j) {
      const bool free = fixed_[i] == kNotInArena && fixed_[j] == kNotInArena;
      if (free && keys[j] < keys[i] && twins(buffers_[i], buffers_[j])) std::swap(keys[i], keys[j]);
    }
  }
  const std::vector<Offset> settled = settle(buffers_, keys, fixed_);
  std::vector<double> values(program_.num_columns(), 0.0);
  Bytes height = base_;
  for (std::int32_t i = 0; i < n; ++i) {
    if (columns_[i] >= 0) values[columns_[i]] = static_cast<double>(settled[i] / unit_);
    height = std::max(height, settled[i] + buffers_[i].size);
  }
  for (const auto& [i, j, b] : pairs_) values[b] = settled[i] < settled[j] ? 1.0 : 0.0;
  if (height_ >= 0) values[height_] = static_cast<double>((height - base_) / unit_);
  return values;
}

std::vector<Offset> AddressProgram::decode(std::span<const double> values) const {
  std::vector<double> keys(buffers_.size());
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = columns_[i] >= 0 ? values[columns_[i]] : lower_[i];
  return settle(buffers_, keys, fixed_);
}

Bytes AddressProgram::height_bytes(double objective) const { return base_ + unit_ * std::llround(objective); }

Bytes AddressProgram::bound_bytes(double bound) const {
  if (!(bound > 0.0)) return base_;
  return base_ + unit_ * static_cast<Bytes>(std::ceil(bound - 0.05 - 1e-9 * bound));
}

}  // namespace olla
