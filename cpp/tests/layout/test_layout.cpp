#include "buffers.hpp"
#include "olla/base/error.hpp"

using namespace olla;

TEST(nothing_to_place_has_height_zero) {
  const LayoutResult empty = solve({});
  CHECK_EQ(empty.height, 0);
  CHECK(empty.status == Status::kOptimal);
  const std::vector<Buffer> dead = {{3, 3, 7}, {5, 2, 7}, {0, 9, 0}};
  const LayoutResult result = solve(dead);
  check_layout(dead, result, 1);
  CHECK_EQ(result.height, 0);
}

TEST(buffers_that_follow_each_other_share_their_bytes) {
  const LayoutResult result = solve({{0, 1, 10}, {1, 2, 20}, {2, 3, 5}});
  CHECK_EQ(result.offsets, {0, 0, 0});
  CHECK_EQ(result.height, 20);
  CHECK(result.status == Status::kOptimal);
}

TEST(sizes_are_rounded_up_to_the_alignment) {
  const std::vector<Buffer> buffers = {{0, 2, 1}, {1, 3, 513}, {1, 2, 512}};
  const LayoutResult result = solve(buffers, {.alignment = 512});
  check_layout(buffers, result, 512);
  CHECK_EQ(result.height, 2048);
}

TEST(extreme_times_do_not_overflow) {
  const std::vector<Buffer> buffers = {{kLeast, kMost, 3}, {kLeast, 0, 5}, {0, kMost, 4}, {kMost, kLeast, 9}};
  const LayoutResult result = solve(buffers);
  check_layout(buffers, result, 1);
  CHECK_EQ(result.height, 8);
}

TEST(negative_and_overflowing_sizes_are_rejected) {
  CHECK_THROWS(solve({{0, 1, -1}}), PlanError, "sizes");
  CHECK_THROWS(solve({{0, 1, kMaxBytes}, {5, 6, 1}}), PlanError, "sizes");
  CHECK_THROWS(solve({{0, 1, kMaxBytes - 1}, {5, 6, 1}}, {.alignment = 512}), PlanError, "sizes");
  CHECK_THROWS(solve({{0, 1, kMost}}, {.alignment = kMost}), PlanError, "sizes");
  CHECK_THROWS(solve({{0, 1, 1}}, {.alignment = 0}), PlanError, "alignment");
  CHECK_THROWS(solve({{0, 1, 1}}, {.capacity = -1}), PlanError, "capacity");
  CHECK_EQ(solve({{0, 1, kMaxBytes - 1}, {0, 1, 1}}).height, kMaxBytes);
}

TEST(height_equals_brute_force_up_to_seven_buffers) {
  for (std::uint32_t seed = 0; seed < 600; ++seed) {
    const std::size_t count = 1 + seed % (seed < 500 ? 6 : 7);
    const std::vector<Buffer> buffers = random_buffers(count, 3 + seed % 9, 4 + seed % 13, seed);
    const Bytes alignment = seed % 3 == 0 ? 4 : 1;
    const LayoutResult result = solve(buffers, {.alignment = alignment});
    check_layout(buffers, result, alignment);
    CHECK_EQ(result.height, brute_force(buffers, alignment));
    CHECK(result.status == Status::kOptimal);
  }
}

constexpr std::array kSwitches{&LayoutOptions::use_enumeration,   &LayoutOptions::use_keys,      &LayoutOptions::use_births,
                               &LayoutOptions::use_squeaky_wheel, &LayoutOptions::use_foresight, &LayoutOptions::use_exact,
                               &LayoutOptions::use_neighbourhood, &LayoutOptions::use_beam};

TEST(any_choice_of_searches_gives_a_valid_layout_and_none_beats_the_proof) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(seed % 9 + 1, 8, 12, seed);
    const Bytes least = solve(buffers).height;
    std::mt19937_64 random(seed);
    for (int round = 0; round < 32; ++round) {
      LayoutOptions options{.seed = seed, .max_placements = 20'000};
      for (bool LayoutOptions::* use : kSwitches) options.*use = random() % 2 == 0;
      const LayoutResult result = solve(buffers, options);
      check_layout(buffers, result, 1);
      CHECK(result.height >= least);
      if (options.use_enumeration || options.use_exact) CHECK_EQ(result.height, least);
    }
  }
}

TEST(larger_layouts_are_valid) {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    const std::vector<Buffer> random = random_buffers(300, 200, 1000, seed);
    const LayoutResult result = solve(random, {.alignment = 8, .max_placements = 30'000, .max_nodes = 20'000});
    check_layout(random, result, 8);
    CHECK(static_cast<double>(result.height) <= 1.25 * static_cast<double>(result.load));
  }
}

TEST(training_steps_end_at_their_load) {
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const std::vector<Buffer> buffers = training_buffers(200 + 50 * seed, seed);
    const LayoutResult result = solve(buffers, {.alignment = 512});
    check_layout(buffers, result, 512);
    CHECK_EQ(result.height, result.load);
  }
}

LayoutOptions greedy_rules() {
  LayoutOptions options;
  for (bool LayoutOptions::* use : kSwitches) options.*use = false;
  options.use_keys = options.use_births = true;
  return options;
}

TEST(the_squeaky_wheel_lowers_what_the_greedy_rules_leave) {
  int num_lower = 0;
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(60, 60, 40, seed);
    LayoutOptions options = greedy_rules();
    const Bytes greedy = solve(buffers, options).height;
    options.max_placements = 60'000;
    options.use_squeaky_wheel = true;
    const Bytes improved = solve(buffers, options).height;
    CHECK(improved <= greedy);
    num_lower += improved < greedy;
  }
  CHECK(num_lower > 0);
}

TEST(foresight_ends_at_the_load_where_the_squeaky_wheel_alone_does_not) {
  int num_alone = 0;
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    const std::vector<Buffer> buffers = hard_buffers(seed);
    LayoutOptions options = greedy_rules();
    options.max_placements = 400'000;
    options.use_squeaky_wheel = options.use_foresight = true;
    const LayoutResult result = solve(buffers, options);
    check_layout(buffers, result, 1);
    CHECK_EQ(result.height, result.load);
    options.use_foresight = false;
    num_alone += solve(buffers, options).height == result.load;
  }
  CHECK(num_alone < 3);
}

TEST(a_height_within_the_capacity_is_enough) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(7, 8, 12, seed);
    const LayoutResult least = solve(buffers);
    const LayoutResult roomy = solve(buffers, {.capacity = least.height + 5});
    check_layout(buffers, roomy, 1);
    CHECK(roomy.height <= least.height + 5);
    const LayoutResult tight = solve(buffers, {.capacity = std::max(Bytes{1}, least.height - 1)});
    check_layout(buffers, tight, 1);
    CHECK_EQ(tight.bound, least.height);
  }
}

TEST(the_neighbourhood_search_gives_valid_layouts_that_are_no_higher) {
  int num_lower = 0;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(150, 60, 1000, seed);
    LayoutOptions options = greedy_rules();
    options.max_nodes = test::kSanitized ? 8'000 : 40'000;
    const Bytes before = solve(buffers, options).height;
    options.use_neighbourhood = true;
    const LayoutResult result = solve(buffers, options);
    check_layout(buffers, result, 1);
    CHECK(result.height <= before);
    num_lower += result.height < before;
  }
  CHECK(num_lower > 0);
}

TEST(threads_find_valid_layouts_and_agree_on_what_is_proved) {
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    const std::vector<Buffer> buffers = hard_buffers(seed);
    const std::vector<Buffer> some(buffers.begin(), buffers.begin() + 120);
    const LayoutResult alone = solve(some, {.max_nodes = 100'000}),
                       together = solve(some, {.num_threads = 3, .max_nodes = 100'000});
    check_layout(some, alone, 1);
    check_layout(some, together, 1);
    CHECK(together.bound <= alone.height && alone.bound <= together.height);
  }
}

TEST(fixed_buffers_stay_and_the_others_are_built_around_them) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    std::vector<Buffer> buffers = random_buffers(80, 60, 40, seed);
    const LayoutResult first = solve(buffers, {.max_placements = 10'000});
    for (std::size_t i = 0; i < buffers.size(); i += 3) buffers[i].fixed = first.offsets[i];
    const LayoutResult around = solve(buffers, {.seed = seed, .max_placements = 10'000});
    check_layout(buffers, around, 1);
    for (std::size_t i = 0; i < buffers.size(); i += 3) CHECK_EQ(around.offsets[i], buffers[i].fixed);
  }
}

TEST(fixed_buffers_that_collide_or_are_misaligned_are_rejected) {
  CHECK_THROWS(solve({{0, 2, 4, 0}, {1, 3, 4, 3}}), PlanError, "fixed");
  CHECK_THROWS(solve({{0, 2, 4, 3}}, {.alignment = 2}), PlanError, "fixed");
  CHECK_THROWS(solve({{0, 2, 4, kFree, -2}}), PlanError, "preferred");
  CHECK_EQ(solve({{0, 2, 4, 0}, {2, 3, 4, 3}}).height, 7);
}

TEST(preferred_offsets_are_kept_where_they_cost_no_height) {
  const LayoutResult result = solve({{0, 2, 4, kFree, 4}, {0, 2, 4, kFree, 4}, {3, 4, 2, kFree, 6}, {3, 4, 1, kFree, 100}});
  CHECK_EQ(result.height, 8);
  CHECK_EQ(result.offsets[0] + result.offsets[1], 4);
  CHECK_EQ(result.offsets[2], 6);
}

TEST(the_same_seed_gives_the_same_offsets) {
  const std::vector<Buffer> buffers = random_buffers(120, 80, 500, 7);
  const LayoutOptions options{.seed = 3, .max_placements = 50'000};
  CHECK_EQ(solve(buffers, options).offsets, solve(buffers, options).offsets);
}

TEST(doubled_sizes_double_every_offset_and_shifted_times_change_nothing) {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(80, 60, 300, seed);
    const LayoutOptions options{.seed = seed, .max_placements = 20'000};
    const std::vector<Offset> offsets = solve(buffers, options).offsets;
    std::vector<Buffer> doubled = buffers, shifted = buffers;
    for (Buffer& b : doubled) b.size *= 2;
    for (Buffer& b : shifted) b.lower -= 1'000'000, b.upper -= 1'000'000;
    std::vector<Offset> twice = offsets;
    for (Offset& offset : twice) offset *= 2;
    CHECK_EQ(solve(doubled, options).offsets, twice);
    CHECK_EQ(solve(shifted, options).offsets, offsets);
  }
}

TEST(the_time_limit_is_kept) {
  const std::vector<Buffer> buffers = random_buffers(2000, 2000, 1000, 5);
  Control control("layout", 0.2, nullptr);
  const LayoutResult result = layout(buffers, {.max_placements = kMaxBytes}, control);
  check_layout(buffers, result, 1);
  CHECK(control.seconds() >= 0.2 && control.seconds() < 2);
  CHECK(result.status == Status::kFeasible);
}

TEST(progress_can_stop_the_search) {
  const std::vector<Buffer> buffers = random_buffers(2000, 2000, 1000, 5);
  int num_calls = 0;
  Control control("layout", 60, [&](const Progress& p) {
    CHECK(p.value >= p.bound && p.bound > 0);
    return ++num_calls < 2;
  });
  check_layout(buffers, layout(buffers, {.max_placements = kMaxBytes}, control), 1);
  CHECK(control.cancelled() && control.seconds() < 10);
  CHECK_EQ(num_calls, 2);
}

TEST(a_hundred_thousand_nested_lifetimes_are_placed) {
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < 100'000; ++i) buffers.push_back({i, 200'000 - i, 1 + i % 7});
  const LayoutResult result = solve(buffers);
  CHECK_EQ(result.height, result.load);
}

// A first pass takes longer than the time between two questions.
constexpr std::int64_t kLongToPlace = test::kSanitized ? 400'000 : 2'000'000;

TEST(a_first_pass_that_is_stopped_still_gives_a_layout) {
  const std::int64_t count = kLongToPlace;
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < count; ++i) buffers.push_back({i, 2 * count - i + i % 3, 1 + i * i % 7});
  Control control("layout", 60, [](const Progress&) { return false; });
  const LayoutResult result = layout(buffers, {}, control);
  CHECK(control.cancelled());
  CHECK_EQ(std::ranges::count(result.offsets, kFree), 0);
  CHECK(result.height >= result.load);
}

TEST(a_first_pass_that_is_stopped_is_no_stack_where_sizes_return) {
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < kLongToPlace; ++i) buffers.push_back({i, i + 1 + i * i % 1000, 1 + i * i % 7});
  Control control("layout", 60, [](const Progress&) { return false; });
  const LayoutResult result = layout(buffers, {}, control);
  CHECK(control.cancelled());
  CHECK_EQ(std::ranges::count(result.offsets, kFree), 0);
  CHECK(result.height < 2 * result.load);
}

OLLA_TEST_MAIN
