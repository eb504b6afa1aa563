#include "olla/layout/pipelines/repetition.hpp"

#include "olla/base/hash.hpp"

namespace olla {
namespace {

constexpr std::size_t kMinRepeats = 4;

// The least p with which all values equal those p before them (Knuth, Morris, Pratt 1977).
std::size_t least_period(std::span<const std::uint64_t> values) {
  std::vector<std::size_t> border(values.size() + 1, 0);
  for (std::size_t k = 1, length = 0; k < values.size(); ++k) {
    while (length > 0 && values[k] != values[length]) length = border[length];
    if (values[k] == values[length]) ++length;
    border[k + 1] = length;
  }
  return values.size() - border.back();
}

}  // namespace

bool births_repeat(const Part& part) {
  std::vector<std::uint64_t> births(part.section_load.size(), 0);  // of a section: a sum over what is born there
  for (const Item& item : part.items) {
    const std::uint64_t size = mixed(static_cast<std::uint64_t>(item.size));
    births[item.first] += mixed(size + static_cast<std::uint64_t>(item.last - item.first));
  }
  const std::size_t quarter = births.size() / 4, middle = births.size() - 2 * quarter;
  if (middle < 2 * kMinRepeats) return false;
  return least_period(std::span(births).subspan(quarter, middle)) <= middle / kMinRepeats;
}

}  // namespace olla
