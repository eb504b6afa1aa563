#include <algorithm>
#include <random>

#include "olla/recompute/front.hpp"
#include "test.hpp"

using namespace olla;

TEST(front_keeps_exactly_what_nothing_is_better_than) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 200; ++turn) {
    Front front;
    std::vector<Point> all;
    for (int i = 0; i < 30; ++i) {
      std::vector<Point> points;
      for (std::size_t k = 0; k < 1 + random() % 4; ++k) points.push_back({Bytes(random() % 20), double(random() % 20), k});
      std::vector<Decision> decisions(4, Decision{Drop{i, 0}});
      front.offer(points, decisions);
      all.insert(all.end(), points.begin(), points.end());
    }
    const auto kept = front.points();
    for (std::size_t i = 1; i < kept.size(); ++i) {
      CHECK(kept[i - 1].peak < kept[i].peak && kept[i - 1].added_seconds > kept[i].added_seconds);
    }
    for (const Point& point : all) {
      CHECK(std::ranges::any_of(kept,
                                [&](const Point& k) { return k.peak <= point.peak && k.added_seconds <= point.added_seconds; }));
    }
    for (Bytes limit = 0; limit < 20; ++limit) {
      const auto cheap = front.best({true, limit, 0}), low = front.best({false, 0, double(limit)});
      for (const Point& point : all) {
        if (point.peak <= limit) CHECK(cheap && cheap->point.added_seconds <= point.added_seconds && cheap->point.peak <= limit);
        if (point.added_seconds <= double(limit)) CHECK(low && low->point.peak <= point.peak && low->point.added_seconds <= limit);
      }
      if (cheap) CHECK(cheap->decisions().size() == cheap->point.num_decisions);
    }
  }
}

OLLA_TEST_MAIN
