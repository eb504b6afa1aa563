#include "olla/layout/pipelines/repetition.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "olla/base/hash.hpp"

namespace olla {
namespace {

constexpr Section kMinRepeats = 4;

// The least p with which all values equal those p before them (Knuth, Morris, Pratt).
std::size_t least_period(std::span<const std::uint64_t> values) {
  std::vector<std::size_t> border(values.size() + 1, 0);
  for (std::size_t k = 1, length = 0; k < values.size(); ++k) {
    while (length > 0 && values[k] != values[length]) length = border[length];
    if (values[k] == values[length]) ++length;
    border[k + 1] = length;
  }
  return values.size() - border.back();
}

struct Births {
  std::vector<std::uint64_t> sizes, lives;  // of what is born in a section: its sizes; its sizes and lifetimes

  explicit Births(const Part& part) : sizes(part.num_sections(), 0), lives(sizes) {
    for (const Item& item : part.items) {
      const std::uint64_t size = mixed(static_cast<std::uint64_t>(item.size));
      sizes[item.first] += size;
      lives[item.first] += mixed(size + static_cast<std::uint64_t>(item.last - item.first));
    }
  }
};

// Of the middle half, and from there as far as it goes.
bool find_period(const Part& part, Repetition& found) {
  const Births births(part);
  const Section num_sections = part.num_sections();
  found.begin = num_sections / 4;
  found.end = num_sections - found.begin;
  const Section middle = found.end - found.begin;
  if (middle < 2 * kMinRepeats) return false;
  found.period = static_cast<Section>(least_period(std::span(births.lives).subspan(found.begin, middle)));
  if (found.period > middle / kMinRepeats) return false;
  const auto repeats = [&](const std::vector<std::uint64_t>& values, Section s) { return values[s] == values[s - found.period]; };
  while (found.begin > 0 && repeats(births.lives, found.begin - 1 + found.period)) --found.begin;
  while (found.end < num_sections && repeats(births.lives, found.end)) ++found.end;
  for (found.last = found.end; found.last < num_sections && repeats(births.sizes, found.last);) ++found.last;
  return true;
}

void settle(const Part& part, Repetition& found) {
  const Section middle = (found.begin + found.end) / 2;
  Section longest = 1;
  found.settled = found.begin;
  for (const Item& item : part.items) {
    if (item.first >= found.end) break;
    if (item.first >= found.begin) {
      longest = std::max(longest, item.last - item.first);
    } else if (item.last < middle) {
      found.settled = std::max(found.settled, item.last);
    } else if (item.last <= found.end) {
      found.end = item.last;
    }
  }
  found.length = (longest + found.period - 1) / found.period * found.period;
}

}  // namespace

std::optional<Repetition> Repetition::find(const Part& part) {
  Repetition found;
  if (!find_period(part, found)) return std::nullopt;
  settle(part, found);
  found.sorted.resize(part.items.size());
  std::iota(found.sorted.begin(), found.sorted.end(), 0);
  std::ranges::sort(found.sorted, {},
                    [&](ItemId i) { return std::tuple(part.items[i].first, part.items[i].size, part.items[i].last, i); });
  found.born_before = olla::born_before(part);
  return found;
}

}  // namespace olla
