#include <random>

#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/address_program.hpp"
#include "olla/layout/problem/packing.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;

namespace {

AddressIlpResult solve(const std::vector<Buffer>& buffers, Bytes alignment = 1, const std::vector<Offset>& fixed = {},
                       const std::vector<Offset>& start = {}, double time_limit = 60.0) {
  Control control("address", time_limit, {});
  return address_ilp(buffers, alignment, fixed, start, 0, Highs(test::highs_library()), IlpOptions{}, control);
}

// Lifetimes that leave no layout as low as their load, and sizes near those that do so.
std::vector<Buffer> tight_buffers(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto scale = static_cast<Bytes>(1 + random() % 5);
  std::vector<Buffer> buffers = {{0, 1, 3}, {0, 2, 3}, {1, 3, 2}, {1, 4, 1}, {2, 3, 1}, {2, 4, 2}, {3, 5, 3}, {4, 5, 3}};
  for (Buffer& buffer : buffers) buffer.size = buffer.size * scale + static_cast<Bytes>(random() % 2);
  return buffers;
}

Bytes least_height(const std::vector<Buffer>& buffers) {
  Bytes height = 0;
  for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) height = std::max(height, enumerate(part, 0).height);
  return height;
}

}  // namespace

TEST(the_least_height_equals_enumeration) {
  int num_solved = 0, num_above_load = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const std::vector<Buffer> buffers = tight_buffers(seed);
    const AddressIlpResult result = solve(buffers);
    CHECK(result.status == Status::kOptimal);
    CHECK_EQ(result.height, least_height(buffers));
    CHECK_EQ(result.bound, result.height);
    CHECK_EQ(true_height(buffers, result.offsets), result.height);
    num_solved += result.figures.num_columns > 0;
    num_above_load += result.height > result.load;
  }
  CHECK(num_solved > 30 && num_above_load > 10);
}

TEST(fixed_buffers_stay_and_the_rest_is_laid_out_around_them) {
  const std::vector<Buffer> buffers = {{0, 4, 4}, {0, 4, 3}, {1, 3, 2}, {6, 7, 1}};
  const AddressIlpResult result = solve(buffers, 1, {2, kNotInArena, kNotInArena, kNotInArena});
  CHECK_EQ(result.offsets, (std::vector<Offset>{2, 6, 0, 0}));
  CHECK(result.status == Status::kOptimal);
  const AddressIlpResult wasted = solve({{0, 4, 4}, {0, 4, 3}}, 1, {2, kNotInArena});
  CHECK_EQ(wasted.height, Bytes{9});  // proved, though the load is 7
  CHECK(wasted.status == Status::kOptimal && wasted.load == 7);
}

TEST(sizes_are_rounded_up_to_the_alignment) {
  const AddressIlpResult result = solve({{0, 2, 3}, {0, 2, 9}}, 8);
  CHECK_EQ(result.height, Bytes{24});
  for (const Offset offset : result.offsets) CHECK_EQ(offset % 8, Offset{0});
}

TEST(without_time_the_start_comes_back) {
  const std::vector<Buffer> buffers = {{0, 1, 3}, {0, 2, 3}, {1, 3, 2}, {1, 4, 1}, {2, 3, 1}, {2, 4, 2}, {3, 5, 3}, {4, 5, 3}};
  const AddressIlpResult result = solve(buffers, 1, {}, {}, 0.0);
  CHECK(result.status == Status::kFeasible);
  CHECK_EQ(result.bound, Bytes{6});
  CHECK(true_height(buffers, result.offsets) == result.height);
  CHECK(result.figures.message.find("time limit") != std::string::npos);
}

TEST(invalid_input_is_named) {
  const std::vector<Buffer> buffers = {{0, 2, 4}, {1, 3, 2}};
  CHECK_THROWS(solve(buffers, 1, {}, {0}), PlanError, "lengths");
  CHECK_THROWS(solve(buffers, 1, {}, {0, 1}), PlanError, "start");
  CHECK_THROWS(solve(buffers, 4, {2, kNotInArena}), PlanError, "fixed");
  CHECK_THROWS(solve(buffers, 1, {0, 1}), PlanError, "start");
  CHECK_THROWS(solve(buffers, 1, {4, kNotInArena}, {0, 4}), PlanError, "start");
}

OLLA_HIGHS_TEST_MAIN
