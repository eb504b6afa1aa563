#include <random>

#include "olla/ilp/address_program.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;
using Outcome = AddressProgram::Outcome;
using test::objective, test::satisfies;

namespace {

constexpr std::int64_t kNoLimit = 1'000'000;
const std::vector<Offset> kNothingFixed;

// Lifetimes whose load is 6 bytes everywhere, and that no layout of 6 bytes holds.
const std::vector<Buffer> kTight = {{0, 1, 3}, {0, 2, 3}, {1, 3, 2}, {1, 4, 1}, {2, 3, 1}, {2, 4, 2}, {3, 5, 3}, {4, 5, 3}};

std::vector<Buffer> random_buffers(std::uint32_t seed, int most) {
  std::mt19937 random(seed);
  std::vector<Buffer> buffers;
  for (int i = 0; i < most; ++i) {
    const auto lower = static_cast<std::int64_t>(random() % 6);
    buffers.push_back({lower, lower + 1 + static_cast<std::int64_t>(random() % 4), 1 + static_cast<Bytes>(random() % 9)});
  }
  return buffers;
}

}  // namespace

TEST(only_pairs_alive_together_get_a_variable) {
  const std::vector<Buffer> buffers = {{0, 2, 4}, {1, 3, 2}, {2, 4, 3}};  // the first and the last never meet
  const AddressProgram p(buffers, kNothingFixed, 6, 9, kNoLimit);
  CHECK(p.outcome() == Outcome::kBuilt);
  // Three addresses, two pairs, the height; two rows for each pair, one for each end.
  CHECK_EQ(p.program().num_columns(), 3 + 2 + 1);
  CHECK_EQ(p.program().num_rows(), 2 * 2 + 3);
}

TEST(twins_stand_by_id_without_a_variable) {
  const std::vector<Buffer> buffers = {{0, 2, 4}, {0, 2, 4}};
  const AddressProgram p(buffers, kNothingFixed, 8, 12, kNoLimit);
  CHECK_EQ(p.program().num_columns(), 2 + 1);
  CHECK(satisfies(p.program(), p.encode(std::vector<Offset>{4, 0})));
}

TEST(a_height_equal_to_the_bound_is_no_variable) {
  const AddressProgram p(kTight, kNothingFixed, 7, 7, kNoLimit);
  for (const double cost : p.program().cost) CHECK_EQ(cost, 0.0);
}

TEST(fixed_buffers_have_no_address_and_decide_what_fits_one_way_only) {
  const std::vector<Buffer> buffers = {{0, 4, 4}, {0, 4, 3}, {1, 3, 2}};
  const std::vector<Offset> fixed = {2, kNotInArena, kNotInArena};  // below it, two bytes: the second buffer lies above
  const AddressProgram p(buffers, fixed, 9, 9, kNoLimit);
  CHECK(p.outcome() == Outcome::kBuilt);
  CHECK_EQ(p.program().num_columns(), 0);  // nothing is left to decide
  CHECK_EQ(p.decode(p.encode(std::vector<Offset>{2, 6, 0})), (std::vector<Offset>{2, 6, 0}));
}

TEST(fixed_buffers_that_leave_no_room_are_proved_to_without_a_solver) {
  const std::vector<Buffer> buffers = {{0, 4, 4}, {0, 4, 3}};
  const std::vector<Offset> fixed = {2, kNotInArena};
  CHECK(AddressProgram(buffers, fixed, 7, 8, kNoLimit).outcome() == Outcome::kNoAnswer);
}

TEST(sizes_count_their_common_divisor) {
  std::vector<Buffer> large = kTight;
  for (Buffer& buffer : large) buffer.size *= 3 * 512;
  const AddressProgram p(large, kNothingFixed, 6 * 1536, 8 * 1536, kNoLimit), unscaled(kTight, kNothingFixed, 6, 8, kNoLimit);
  CHECK_EQ(p.program().value, unscaled.program().value);  // no M above the height in units
  for (const double value : p.program().value) CHECK(std::abs(value) <= 8.0);
  CHECK_EQ(p.value_bytes(1.0), Bytes{7 * 1536});
  CHECK_EQ(p.bound_bytes(0.2), Bytes{7 * 1536});
}

TEST(a_layout_within_the_target_is_an_answer_with_its_height) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(seed, 8);
    std::vector<double> keys;
    for (std::size_t i = 0; i < buffers.size(); ++i) keys.push_back(static_cast<double>((i * 5 + seed) % 8));
    const std::vector<Offset> offsets = settle(buffers, keys, {});
    const Bytes height = true_height(buffers, offsets);
    CHECK(height < kMaxBytes);
    const AddressProgram p(buffers, kNothingFixed, 1, height, kNoLimit);
    CHECK(p.outcome() == Outcome::kBuilt);
    const std::vector<double> values = p.encode(offsets);
    CHECK(satisfies(p.program(), values));
    CHECK(p.value_bytes(objective(p.program(), values)) <= height);
    const Bytes decoded = true_height(buffers, p.decode(values));
    CHECK(decoded <= p.value_bytes(objective(p.program(), values)));
  }
}

TEST(true_height_sees_overlaps_in_time_and_memory_only) {
  const std::vector<Buffer> buffers = {{0, 2, 4}, {1, 3, 2}, {2, 4, 3}};
  CHECK_EQ(true_height(buffers, std::vector<Offset>{0, 4, 0}), Bytes{6});
  CHECK_EQ(true_height(buffers, std::vector<Offset>{0, 3, 0}), kMaxBytes);
  CHECK_EQ(true_height(buffers, std::vector<Offset>{-1, 4, 0}), kMaxBytes);
}

TEST(a_program_beyond_a_limit_is_not_built) {
  CHECK(AddressProgram(kTight, kNothingFixed, 6, 8, 10).outcome() == Outcome::kTooLarge);
  const std::vector<Buffer> far = {{0, 2, (Bytes{1} << 40) + 1}, {1, 3, 3}};
  CHECK(AddressProgram(far, kNothingFixed, 3, Bytes{1} << 41, kNoLimit).outcome() == Outcome::kTooLarge);
}

OLLA_TEST_MAIN
