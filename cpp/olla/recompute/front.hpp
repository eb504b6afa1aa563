// The Pareto front of the simulated choices: no other one needs as little memory at as little added time.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "olla/recompute/candidates.hpp"

namespace olla {

// Either the least added time with at most this peak, or the least peak with at most this added time.
struct Target {
  bool least_time;
  Bytes peak;
  double added_seconds;
};

// State of a search: what its decisions reach.
struct Point {
  Bytes peak;
  double added_seconds;           // to the time of the ops as they are
  std::size_t num_decisions = 0;  // in force
};

class Front {
 public:
  struct Choice {
    Point point;
    std::shared_ptr<const std::vector<Decision>> all;  // the first point.num_decisions of them
    std::vector<Decision> decisions() const {
      return {all->begin(), all->begin() + static_cast<std::ptrdiff_t>(point.num_decisions)};
    }
  };

  // Adds the points that no earlier point dominates; each is reached by the first decisions of a list. O(points * log choices),
  // plus what moves.
  void offer(std::span<const Point> points, const std::vector<Decision>& decisions);
  void clear() { choices_.clear(); }
  // The best that meets the target's limit, if there is one.
  std::optional<Choice> best(const Target& target) const;
  std::vector<Point> points() const;  // falling in time, rising in peak

 private:
  std::vector<Choice> choices_;  // rising peaks, falling times
};

}  // namespace olla
