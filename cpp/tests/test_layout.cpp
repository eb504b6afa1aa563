#include <algorithm>
#include <numeric>
#include <random>

#include "olla/error.hpp"
#include "olla/layout.hpp"
#include "olla/online.hpp"
#include "olla/packing.hpp"
#include "olla/skyline.hpp"
#include "test.hpp"

using namespace olla;

namespace {

constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(), kMost = std::numeric_limits<std::int64_t>::max();

LayoutResult solve(const std::vector<Buffer>& buffers, const LayoutOptions& options = {}, double limit_seconds = 60) {
  Control control("layout", limit_seconds, nullptr);
  return layout(buffers, options, control);
}

bool alive(const Buffer& b) { return b.lower < b.upper && b.size > 0; }
Bytes rounded(const Buffer& b, Bytes alignment) { return (b.size + alignment - 1) / alignment * alignment; }

// Pair by pair, straight from the definition.
void check_layout(const std::vector<Buffer>& buffers, const LayoutResult& result, Bytes alignment) {
  CHECK_EQ(result.offsets.size(), buffers.size());
  Bytes height = 0, load = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Offset offset = result.offsets[i];
    CHECK(offset >= 0 && offset % alignment == 0);
    if (!alive(buffers[i])) {
      CHECK_EQ(offset, 0);
      continue;
    }
    height = std::max(height, offset + rounded(buffers[i], alignment));
    Bytes live = 0;  // at the birth of i: some birth is where the load is reached
    for (std::size_t j = 0; j < buffers.size(); ++j) {
      if (!alive(buffers[j])) continue;
      if (buffers[j].lower <= buffers[i].lower && buffers[i].lower < buffers[j].upper) live += rounded(buffers[j], alignment);
      const bool together = i != j && buffers[i].lower < buffers[j].upper && buffers[j].lower < buffers[i].upper;
      if (together) CHECK(offset + buffers[i].size <= result.offsets[j] || result.offsets[j] + buffers[j].size <= offset);
    }
    load = std::max(load, live);
  }
  CHECK_EQ(result.height, height);
  CHECK_EQ(result.load, load);
  CHECK(result.load <= result.bound && result.bound <= result.height);
  CHECK_EQ(result.status == Status::kOptimal, result.bound == result.height);
}

// Every buffer at the lowest place free of those before it, for every order of the buffers: one of them gives the least height.
Bytes brute_force(const std::vector<Buffer>& buffers, Bytes alignment) {
  std::vector<std::size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0);
  Bytes best = kMost;
  do {
    std::vector<Offset> offsets(buffers.size(), 0);
    Bytes height = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
      const Buffer& b = buffers[order[k]];
      if (!alive(b)) continue;
      Offset lowest = 0;
      for (std::size_t round = 0; round <= k; ++round) {
        for (std::size_t l = 0; l < k; ++l) {
          const Buffer& other = buffers[order[l]];
          const bool together = alive(other) && b.lower < other.upper && other.lower < b.upper;
          const Offset end = offsets[order[l]] + rounded(other, alignment);
          if (together && lowest < end && offsets[order[l]] < lowest + rounded(b, alignment)) lowest = end;
        }
      }
      offsets[order[k]] = lowest;
      height = std::max(height, lowest + rounded(b, alignment));
    }
    best = std::min(best, height);
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

std::vector<Buffer> random_buffers(std::size_t count, std::int64_t horizon, Bytes max_size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < count; ++i) {
    const auto lower = static_cast<std::int64_t>(random() % horizon);
    const auto width = static_cast<std::int64_t>(random() % (horizon / 2 + 1));
    buffers.push_back({lower, lower + width, static_cast<Bytes>(random() % (max_size + 1))});
  }
  return buffers;
}

// Activations from the forward to the backward pass, short-lived temporaries, gradients until the update at the end.
std::vector<Buffer> training_buffers(std::int64_t num_layers, std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto bytes = [&] { return static_cast<Bytes>(1 + random() % 64) << (random() % 16); };
  const std::int64_t end = 2 * num_layers;
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const std::int64_t back = end - 1 - i;
    buffers.push_back({i, back + 1, bytes()});
    buffers.push_back({i, i + 1 + static_cast<std::int64_t>(random() % 3), bytes()});
    buffers.push_back({back, std::min(end, back + 2), bytes()});
    buffers.push_back({back, end + i / 3 + 1, bytes()});
  }
  return buffers;
}

}  // namespace

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

TEST(parts_split_where_no_buffer_crosses) {
  const std::vector<Buffer> buffers = {{0, 2, 1}, {1, 3, 2}, {3, 4, 4}, {3, 5, 8}};
  const std::vector<Part> parts = reduce(buffers, rounded_sizes(buffers, 1));
  CHECK_EQ(parts.size(), 2u);
  CHECK_EQ(parts[0].buffers, {0, 1});
  CHECK_EQ(parts[1].buffers, {2, 3});
  CHECK_EQ(parts[1].load, 12);
  CHECK_EQ(parts[1].num_sections(), 1);  // nothing is born after the death at 4
}

TEST(sections_keep_exactly_the_overlaps) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(20, 30, 5, seed);
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      for (ItemId i = 0; i < part.num_items(); ++i) {
        for (ItemId j = 0; j < i; ++j) {
          const Buffer &a = buffers[part.buffers[i]], &b = buffers[part.buffers[j]];
          const Item &x = part.items[i], &y = part.items[j];
          CHECK_EQ(x.first < y.last && y.first < x.last, a.lower < b.upper && b.lower < a.upper);
        }
      }
    }
  }
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

TEST(every_product_of_the_switches_gives_a_valid_layout_and_none_beats_the_proof) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(seed % 9 + 1, 8, 12, seed);
    const Bytes least = solve(buffers).height;
    for (int switches = 0; switches < 16; ++switches) {
      LayoutOptions options{.seed = seed, .max_placements = 20'000};
      options.use_enumeration = switches & 1;
      options.use_squeaky_wheel = switches & 2;
      options.use_foresight = switches & 4;
      options.use_exact = switches & 8;
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

TEST(the_squeaky_wheel_lowers_what_the_greedy_rules_leave) {
  int num_lower = 0;
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const std::vector<Buffer> buffers = random_buffers(60, 60, 40, seed);
    const Bytes greedy = solve(buffers, {.use_squeaky_wheel = false, .use_exact = false, .use_neighbourhood = false}).height;
    const Bytes improved = solve(buffers, {.max_placements = 60'000, .use_exact = false, .use_neighbourhood = false}).height;
    CHECK(improved <= greedy);
    num_lower += improved < greedy;
  }
  CHECK(num_lower > 0);
}

// Activations that nest only nearly, temporaries, and gradients kept to the end: the greedy rules end above the load.
std::vector<Buffer> hard_buffers(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto draw = [&](std::uint32_t below) { return static_cast<std::int64_t>(random() % below); };
  std::vector<Buffer> buffers;
  const std::int64_t depth = 60;
  for (std::int64_t i = 0; i < depth; ++i) {
    for (int branch = 0; branch < 4; ++branch) {
      const std::int64_t birth = 4 * i + branch, death = 8 * depth - 4 * i + draw(25) - 12;
      buffers.push_back({birth, death, 1 + draw(60)});
      buffers.push_back({birth, birth + 1 + draw(7), 1 + draw(60)});
      buffers.push_back({death - draw(6), death + 1 + draw(5), 1 + draw(60)});
      buffers.push_back({death - 2, 9 * depth, 1 + draw(50)});
    }
  }
  return buffers;
}

TEST(foresight_ends_at_the_load_where_the_squeaky_wheel_alone_does_not) {
  int num_alone = 0;
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    const std::vector<Buffer> buffers = hard_buffers(seed);
    const LayoutResult result = solve(buffers, {.max_placements = 400'000, .use_exact = false, .use_neighbourhood = false});
    check_layout(buffers, result, 1);
    CHECK_EQ(result.height, result.load);
    num_alone += solve(buffers, {.max_placements = 400'000, .use_foresight = false, .use_exact = false, .use_neighbourhood = false})
                     .height == result.load;
  }
  CHECK(num_alone < 3);
}

TEST(a_pass_that_gave_up_is_completed_without_overlap) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<Buffer> buffers = random_buffers(200, 100, 50, seed);
    buffers.push_back({-1, 1000, 1});  // joins all into one part
    const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
    std::vector<ItemId> order(part.num_items());
    std::iota(order.begin(), order.end(), 0);
    Skyline skyline(part);
    Packing packing;
    CHECK(!skyline.place(order, {.target = part.load - 1 - 5 * seed}, [] { return false; }, packing));
    skyline.stack_rest(packing);
    LayoutResult result{std::vector<Offset>(buffers.size(), 0), packing.height, part.load, part.load};
    if (result.height == result.load) result.status = Status::kOptimal;
    for (ItemId i = 0; i < part.num_items(); ++i) result.offsets[part.buffers[i]] = packing.offsets[i];
    check_layout(buffers, result, 1);
  }
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
    LayoutOptions options{.max_nodes = 40'000, .use_squeaky_wheel = false, .use_exact = false, .use_neighbourhood = false};
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

TEST(long_lived_items_find_the_holes_their_like_have_left) {
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < 300; ++i) {
    buffers.push_back({3 * i, 3 * i + 30, 1 + i % 10});  // ten alive at once, of ten sizes
    buffers.push_back({3 * i + 2, 3 * i + 3, 5});
  }
  const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
  const std::vector<Offset> offsets = fit_by_birth(part, 2);
  Bytes top = 0;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    CHECK_EQ(offsets[i] == kUnplaced, part.items[i].last - part.items[i].first <= 2);
    if (offsets[i] != kUnplaced) top = std::max(top, offsets[i] + part.items[i].size);
  }
  CHECK_EQ(top, 55);
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

TEST(the_pool_finds_what_a_scan_finds) {
  std::mt19937 random(1);
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<Buffer> buffers = random_buffers(200, 60, 9, seed);
    buffers.push_back({-1, 1000, 1});  // joins all into one part
    const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
    std::vector<ItemId> order(part.num_items());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    ItemPool pool(part);
    pool.fill(order);
    std::vector<bool> removed(order.size(), false);
    for (int query = 0; query < 300; ++query) {
      Section corner[4];
      for (Section& c : corner) c = static_cast<Section>(random() % (part.num_sections() + 1));
      const ItemPool::Box box{std::min(corner[0], corner[1]), std::max(corner[0], corner[1]), std::min(corner[2], corner[3]),
                              std::max(corner[2], corner[3])};
      std::int32_t scanned = kNoRank;
      for (std::size_t r = order.size(); r-- > 0;) {
        const Item& item = part.items[order[r]];
        const bool inside =
            item.first >= box.min_first && item.first <= box.max_first && item.last >= box.min_last && item.last <= box.max_last;
        if (inside && !removed[r]) scanned = static_cast<std::int32_t>(r);
      }
      CHECK_EQ(pool.best(box), scanned);
      if (scanned != kNoRank && query % 2 == 0) {
        removed[scanned] = true;
        pool.remove(order[scanned]);
      }
    }
  }
}

TEST(the_reach_of_sections_follows_every_raise) {
  std::mt19937 random(2);
  for (Section count = 1; count < 40; ++count) {
    std::vector<Bytes> plain(count);
    for (Bytes& load : plain) load = static_cast<Bytes>(random() % 50);
    SectionReach reach(plain);
    for (int query = 0; query < 60; ++query) {
      const auto first = static_cast<Section>(random() % count);
      const auto last = first + 1 + static_cast<Section>(random() % (count - first));
      const auto bytes = static_cast<Bytes>(random() % 20);
      reach.raise(first, last, bytes);
      for (Section s = first; s < last; ++s) plain[s] += bytes;
      const auto from = static_cast<Section>(random() % count);
      const auto to = from + 1 + static_cast<Section>(random() % (count - from));
      const auto top = std::max_element(plain.begin() + from, plain.begin() + to);
      CHECK(reach.highest(from, to) == std::pair(*top, static_cast<Section>(top - plain.begin())));
    }
  }
}

TEST(a_hundred_thousand_nested_lifetimes_are_placed) {
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < 100'000; ++i) buffers.push_back({i, 200'000 - i, 1 + i % 7});
  const LayoutResult result = solve(buffers);
  CHECK_EQ(result.height, result.load);
}

TEST(a_first_pass_that_is_stopped_still_gives_a_layout) {
  const std::int64_t count = 400'000;
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < count; ++i) buffers.push_back({i, 2 * count - i + i % 3, 1 + i * i % 7});
  Control control("layout", 60, [](const Progress&) { return false; });
  const LayoutResult result = layout(buffers, {}, control);
  CHECK(control.cancelled());
  CHECK_EQ(std::ranges::count(result.offsets, kUnplaced), 0);
  CHECK(result.height >= result.load);
}

OLLA_TEST_MAIN
