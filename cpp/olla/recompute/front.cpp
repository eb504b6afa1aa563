#include "olla/recompute/front.hpp"

#include <algorithm>

namespace olla {

void Front::offer(std::span<const Point> points, const std::vector<Decision>& decisions) {
  std::shared_ptr<const std::vector<Decision>> all;  // one copy for all points, where one of them is taken in
  for (const Point& point : points) {
    auto at = std::ranges::upper_bound(choices_, point.peak, {}, [](const Choice& choice) { return choice.point.peak; });
    if (at != choices_.begin() && std::prev(at)->point.added_seconds <= point.added_seconds) continue;
    if (all == nullptr) all = std::make_shared<const std::vector<Decision>>(decisions);
    if (at != choices_.begin() && std::prev(at)->point.peak == point.peak) --at;
    auto end = at;
    while (end != choices_.end() && end->point.added_seconds >= point.added_seconds) ++end;
    choices_.insert(choices_.erase(at, end), {point, all});
  }
}

std::optional<Front::Choice> Front::best(const Target& target) const {
  if (target.least_time) {  // the last one within the peak: times fall
    const auto end = std::ranges::upper_bound(choices_, target.peak, {}, [](const Choice& choice) { return choice.point.peak; });
    if (end == choices_.begin()) return std::nullopt;
    return *std::prev(end);
  }
  const auto first = std::ranges::find_if(choices_, [&](const Choice& c) { return c.point.added_seconds <= target.added_seconds; });
  if (first == choices_.end()) return std::nullopt;
  return *first;
}

std::vector<Point> Front::points() const {
  std::vector<Point> all;
  for (const Choice& choice : choices_) all.push_back(choice.point);
  return all;
}

}  // namespace olla
