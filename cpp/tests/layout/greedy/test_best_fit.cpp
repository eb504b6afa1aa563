#include <algorithm>
#include <numeric>
#include <random>

#include "olla/base/error.hpp"
#include "olla/layout/greedy/best_fit.hpp"
#include "test.hpp"

using namespace olla;

namespace {

FitResult place(const std::vector<Buffer>& buffers, const std::vector<std::int32_t>& order, Hole hole = Hole::kBest,
                Bytes alignment = 1) {
  Control control("layout", 60, nullptr);
  return fit_in_order(buffers, order, hole, alignment, control);
}

std::vector<std::int32_t> as_given(const std::vector<Buffer>& buffers) {
  std::vector<std::int32_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Straight from the definition: all buffers placed so far are looked at.
std::vector<Offset> slow(const std::vector<Buffer>& buffers, const std::vector<std::int32_t>& order, Hole hole, Bytes alignment) {
  std::vector<Offset> offsets(buffers.size(), 0);
  const auto rounded = [&](const Buffer& b) { return (b.size + alignment - 1) / alignment * alignment; };
  for (std::size_t k = 0; k < order.size(); ++k) {
    const Buffer& b = buffers[order[k]];
    if (b.lower >= b.upper || b.size == 0) continue;
    std::vector<std::pair<Offset, Offset>> used;
    for (std::size_t j = 0; j < k; ++j) {
      const Buffer& other = buffers[order[j]];
      const bool alive = other.lower < other.upper && other.size > 0;
      if (alive && other.lower < b.upper && b.lower < other.upper) {
        used.emplace_back(offsets[order[j]], offsets[order[j]] + rounded(other));
      }
    }
    std::ranges::sort(used);
    Offset top = 0, chosen = -1;
    Bytes best = std::numeric_limits<Bytes>::max();
    for (const auto& [begin, end] : used) {
      const Bytes room = begin - top;
      if (room >= rounded(b) && (hole == Hole::kBest ? room < best : chosen < 0)) best = room, chosen = top;
      top = std::max(top, end);
    }
    offsets[order[k]] = chosen < 0 ? top : chosen;
  }
  return offsets;
}

TEST(a_buffer_goes_into_the_smallest_hole_that_is_large_enough) {
  // Left of 0 to 10 at time 1: holes of 3 at 0 and of 2 at 5.
  const std::vector<Buffer> buffers{{0, 1, 3}, {0, 2, 2}, {0, 1, 2}, {0, 2, 3}, {1, 2, 2}};
  CHECK_EQ(place(buffers, as_given(buffers)).offsets, std::vector<Offset>{0, 3, 5, 7, 5});
  CHECK_EQ(place(buffers, as_given(buffers), Hole::kLowest).offsets, std::vector<Offset>{0, 3, 5, 7, 0});
}

TEST(the_chunks_find_what_a_look_at_all_buffers_finds) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const int num = static_cast<int>(random() % 60), horizon = 1 + static_cast<int>(random() % 40);
    std::vector<Buffer> buffers;
    for (int i = 0; i < num; ++i) {
      const auto lower = static_cast<std::int64_t>(random() % horizon);
      buffers.push_back({lower, lower + static_cast<std::int64_t>(random() % horizon), static_cast<Bytes>(random() % 9)});
    }
    std::vector<std::int32_t> order = as_given(buffers);
    std::ranges::shuffle(order, random);
    for (const Hole hole : {Hole::kBest, Hole::kLowest}) {
      for (const Bytes alignment : {1, 4}) {
        const FitResult found = place(buffers, order, hole, alignment);
        CHECK_EQ(found.offsets, slow(buffers, order, hole, alignment));
        Bytes height = 0;
        for (int i = 0; i < num; ++i) {
          const Buffer& b = buffers[i];
          if (b.lower < b.upper && b.size > 0) {
            height = std::max(height, found.offsets[i] + (b.size + alignment - 1) / alignment * alignment);
          }
        }
        CHECK_EQ(found.height, height);
      }
    }
  }
}

TEST(what_outlives_the_iteration_goes_first_then_by_falling_size) {
  const std::vector<Buffer> buffers{{0, 2, 5}, {1, 9, 1}, {1, 3, 7}, {0, 1, 7}, {2, 9, 3}};
  CHECK_EQ(smartpool_order(buffers, std::vector<std::uint8_t>{0, 1, 0, 0, 1}), std::vector<std::int32_t>{4, 1, 3, 2, 0});
}

TEST(a_stopped_placement_is_still_valid) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 5000; ++i) buffers.push_back({i, i + 10, 1 + i % 7});
  Control control("layout", 0, nullptr);
  const FitResult found = fit_in_order(buffers, as_given(buffers), Hole::kBest, 1, control);
  for (int i = 0; i < 5000; ++i) {
    for (int j = i + 1; j < std::min(5000, i + 10); ++j) {
      const bool apart =
          found.offsets[i] + buffers[i].size <= found.offsets[j] || found.offsets[j] + buffers[j].size <= found.offsets[i];
      CHECK(apart);
    }
  }
}

TEST(wrong_input_is_refused) {
  const std::vector<Buffer> buffers{{0, 1, 3}, {0, 2, 2}};
  CHECK_THROWS(place(buffers, {0, 0}), PlanError, "permutation");
  CHECK_THROWS(place(buffers, {0, 2}), PlanError, "permutation");
  CHECK_THROWS(place(buffers, {0}), PlanError, "permutation");
  CHECK_THROWS(place(buffers, {0, 1}, Hole::kBest, 0), PlanError, "alignment");
  CHECK_THROWS(place({{0, 1, -1}}, {0}), PlanError, "sizes");
  CHECK_THROWS(smartpool_order(buffers, std::vector<std::uint8_t>{1}), PlanError, "lengths");
}

TEST(twenty_thousand_nested_buffers_are_placed_within_a_minute) {
  // Activations of 40 sizes that die in the reverse order of their birth, and temporaries.
  std::mt19937 random(3);
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < 10'000; ++i) {
    buffers.push_back({i, 40'000 - i, 512 * static_cast<Bytes>(1 + random() % 40)});
    buffers.push_back({2 * i, 2 * i + 2, 512 * static_cast<Bytes>(1 + random() % 40)});
  }
  Control control("layout", 60, nullptr);
  const std::vector<std::uint8_t> none(buffers.size(), 0);
  const FitResult found = fit_in_order(buffers, smartpool_order(buffers, none), Hole::kBest, 512, control);
  CHECK(!control.stop(0, 0));
  CHECK(found.height > 0);
  std::cerr << control.seconds() << " s, height " << found.height << "\n";
}

}  // namespace

OLLA_TEST_MAIN
