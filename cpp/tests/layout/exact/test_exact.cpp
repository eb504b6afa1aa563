#include <algorithm>

#include "olla/layout/exact/exact.hpp"
#include "test.hpp"

using namespace olla;

namespace {

constexpr ExactRules kNone{false, false, false, false, false};

Part random_part(std::size_t count, std::int64_t horizon, Bytes max_size, std::mt19937_64& random) {
  std::vector<Buffer> buffers = {{0, horizon + 1, 1}};  // joins all into one part
  while (buffers.size() < count) {
    const auto lower = static_cast<std::int64_t>(random() % horizon);
    const auto width = static_cast<std::int64_t>(1 + random() % horizon);
    buffers.push_back({lower, std::min(horizon, lower + width), static_cast<Bytes>(1 + random() % max_size)});
  }
  return reduce(buffers, rounded_sizes(buffers, 1)).front();
}

// A rectangle cut at random, pinwheels among the cuts: the optimum is the height of the rectangle.
std::vector<Buffer> tight_buffers(std::size_t count, std::int64_t horizon, Bytes height, std::mt19937_64& random) {
  struct Cell {
    std::int64_t left, right, low, high;
  };
  std::vector<Cell> cells = {{0, horizon, 0, height}};
  const auto between = [&](std::int64_t a, std::int64_t b) { return a + 1 + static_cast<std::int64_t>(random() % (b - a - 1)); };
  while (cells.size() < count) {
    const std::size_t k = random() % cells.size();
    const auto [a, b, c, d] = cells[k];
    if (random() % 5 == 0 && b - a > 2 && d - c > 2) {
      const std::int64_t x = between(a, b - 1), y = between(c, d - 1), x2 = between(x, b), y2 = between(y, d);
      cells[k] = {a, x2, c, y};
      cells.insert(cells.end(), {{x2, b, c, y2}, {x, b, y2, d}, {a, x, y, d}, {x, x2, y, y2}});
    } else if (random() % 2 == 0 && b - a > 1) {
      const std::int64_t x = between(a, b);
      cells[k] = {a, x, c, d};
      cells.push_back({x, b, c, d});
    } else if (d - c > 1) {
      const std::int64_t y = between(c, d);
      cells[k] = {a, b, c, y};
      cells.push_back({a, b, y, d});
    }
  }
  std::vector<Buffer> buffers;
  for (const Cell& cell : cells) buffers.push_back({cell.left, cell.right, cell.high - cell.low});
  std::ranges::shuffle(buffers, random);
  return buffers;
}

// Lifetimes at random, then some more until every section is full: often no packing has the height of the load.
Part full_part(std::size_t count, std::int64_t horizon, Bytes height, std::mt19937_64& random) {
  std::vector<Buffer> buffers;
  std::vector<Bytes> room(horizon, height);
  const auto add = [&](std::int64_t lower, std::int64_t upper, Bytes most) {
    const Bytes size = std::min(most, *std::min_element(room.begin() + lower, room.begin() + upper));
    if (size == 0) return;
    buffers.push_back({lower, upper, size});
    for (std::int64_t t = lower; t < upper; ++t) room[t] -= size;
  };
  while (buffers.size() < count) {
    const auto lower = static_cast<std::int64_t>(random() % horizon);
    add(lower, lower + 1 + static_cast<std::int64_t>(random() % (horizon - lower)),
        1 + static_cast<Bytes>(random() % (height / 2)));
    if (random() % 50 == 0) break;
  }
  for (std::int64_t lower = 0; lower < horizon;) {
    std::int64_t upper = lower;
    while (upper < horizon && room[upper] > 0) ++upper;
    if (upper > lower) add(lower, upper, height);
    if (room[lower] == 0) ++lower;
  }
  return reduce(buffers, rounded_sizes(buffers, 1)).front();
}

bool meet(const Part& part, ItemId i, ItemId j) {
  const Item &a = part.items[i], &b = part.items[j];
  return a.first < b.last && b.first < a.last;
}

void check_packing(const Part& part, std::span<const Offset> offsets, Bytes capacity) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Item& item = part.items[i];
    CHECK(offsets[i] >= 0 && offsets[i] + item.size <= capacity);
    for (ItemId j = 0; j < i; ++j) {
      const Item& other = part.items[j];
      if (!meet(part, i, j)) continue;
      CHECK(offsets[i] + item.size <= offsets[j] || offsets[j] + other.size <= offsets[i]);
    }
  }
}

Fit decide(Part part, Bytes capacity, const ExactRules& rules = {}, std::span<const Offset> fixed = {}, std::uint64_t seed = 0,
           std::int64_t max_nodes = 2'000'000) {
  part.fixed.assign(fixed.begin(), fixed.end());
  ExactSearch search(part, rules, seed);
  const Fit fit = search.decide(capacity, {max_nodes, [] { return false; }});
  if (fit == Fit::kFits) check_packing(part, search.offsets(), capacity);
  for (std::size_t i = 0; i < fixed.size(); ++i) CHECK(fixed[i] == kUnplaced || fixed[i] == search.offsets()[i]);
  return fit;
}

// Whether the free items fit, straight from the definition: every start up to the capacity, item by item.
bool fits(const Part& part, std::vector<Offset>& offsets, Bytes capacity) {
  const auto next = std::ranges::find(offsets, kUnplaced);
  if (next == offsets.end()) return true;
  const auto i = static_cast<ItemId>(next - offsets.begin());
  const Item& item = part.items[i];
  for (Offset start = 0; start + item.size <= capacity; ++start) {
    bool clear = true;
    for (ItemId j = 0; j < part.num_items(); ++j) {
      const Item& other = part.items[j];
      if (offsets[j] == kUnplaced || !meet(part, i, j)) continue;
      clear = clear && (start + item.size <= offsets[j] || offsets[j] + other.size <= start);
    }
    if (!clear) continue;
    offsets[i] = start;
    if (fits(part, offsets, capacity)) return true;
    offsets[i] = kUnplaced;
  }
  return false;
}

std::vector<ExactRules> each_rule_alone_and_each_left_out() {
  std::vector<ExactRules> all = {kNone, ExactRules{}};
  for (bool ExactRules::* rule : {&ExactRules::use_machine, &ExactRules::use_table, &ExactRules::use_split, &ExactRules::use_twins,
                                  &ExactRules::use_tightest}) {
    ExactRules alone = kNone, without;
    alone.*rule = true;
    without.*rule = false;
    all.insert(all.end(), {alone, without});
  }
  return all;
}

}  // namespace

TEST(the_least_capacity_that_fits_is_the_enumerated_height) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 1500; ++round) {
    const Part part = random_part(2 + round % 7, 3 + round % 6, 2 + round % 9, random);
    const Bytes least = enumerate(part, 0).height;
    CHECK(decide(part, least) == Fit::kFits);
    CHECK(decide(part, least - 1) == Fit::kNever);
  }
}

TEST(no_rule_changes_an_answer) {
  std::mt19937_64 random(2);
  const std::vector<ExactRules> all = each_rule_alone_and_each_left_out();
  int num_never = 0, num_unknown = 0;
  const int num_rounds = test::kSanitized ? 400 : 1500;
  for (int round = 0; round < num_rounds; ++round) {
    const Part part = full_part(6 + round % 6, 7 + round % 5, 8 + round % 9, random);
    const Bytes capacity = part.load + static_cast<Bytes>(round % 8 == 0);
    const Fit expected = decide(part, capacity);
    CHECK(expected != Fit::kUnknown);
    num_never += expected == Fit::kNever;
    for (const ExactRules& rules : all) {
      const Fit fit = decide(part, capacity, rules, {}, round, 20'000);
      CHECK(fit == expected || fit == Fit::kUnknown);
      num_unknown += fit == Fit::kUnknown;
    }
  }
  CHECK(75 * num_never > num_rounds);
  CHECK(5 * num_unknown < num_rounds);  // of twelve a round: those without the one-machine bound
}

TEST(fixed_items_stay_and_the_answer_is_that_of_brute_force) {
  std::mt19937_64 random(3);
  int num_never = 0, num_fits = 0;
  const int num_rounds = test::kSanitized ? 500 : 1500;
  for (int round = 0; round < num_rounds; ++round) {
    const Part part = random_part(3 + round % 5, 3 + round % 4, 5, random);
    const Bytes capacity = part.load + static_cast<Bytes>(random() % 3);
    std::vector<Offset> fixed(part.items.size(), kUnplaced);
    for (ItemId i = 0; i < part.num_items(); ++i) {  // wherever they happen to lie free of those before
      if (random() % 3 != 0 || part.items[i].size > capacity) continue;
      fixed[i] = static_cast<Offset>(random() % (capacity - part.items[i].size + 1));
      for (ItemId j = 0; j < i; ++j) {
        const Item &a = part.items[i], &b = part.items[j];
        const bool overlap = fixed[j] != kUnplaced && a.first < b.last && b.first < a.last && fixed[i] < fixed[j] + b.size &&
                             fixed[j] < fixed[i] + a.size;
        if (overlap) {
          fixed[i] = kUnplaced;
          break;
        }
      }
    }
    std::vector<Offset> offsets = fixed;
    const bool expected = fits(part, offsets, capacity);
    (expected ? num_fits : num_never) += 1;
    for (const ExactRules& rules : {ExactRules{}, kNone}) {
      CHECK(decide(part, capacity, rules, fixed) == (expected ? Fit::kFits : Fit::kNever));
    }
  }
  CHECK(15 * num_never > num_rounds && 15 * num_fits > num_rounds);
}

TEST(rectangles_cut_at_random_are_put_together_again) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 60; ++round) {
    const std::vector<Buffer> buffers = tight_buffers(12 + round, 10 + round / 2, 40 + 10 * round, random);
    for (const Part& part : reduce(buffers, rounded_sizes(buffers, 1))) {
      CHECK(decide(part, part.load) == Fit::kFits);
      CHECK(decide(part, part.load - 1) == Fit::kNever);
    }
  }
}

TEST(sizes_beyond_the_levels_of_the_search_are_rounded_and_nothing_is_proved_then) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    Part part = random_part(8, 6, 9, random);
    const Bytes least = enumerate(part, 0).height, scale = (Bytes{1} << 50) + 12345;
    for (Item& item : part.items) item.size *= scale;
    for (Bytes& load : part.section_load) load *= scale;
    part.load *= scale;
    CHECK(decide(part, (least + 1) * scale) == Fit::kFits);
    if (least * scale > part.load) CHECK(decide(part, least * scale - 1, {}, {}, 0, 100'000) == Fit::kUnknown);
  }
}

TEST(one_search_answers_for_falling_and_rising_capacities) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 200; ++round) {
    const Part part = random_part(8, 6, 9, random);
    const Bytes least = enumerate(part, 0).height;
    ExactSearch search(part, {}, 0);
    for (const Bytes step : {3, 1, -1, 0, -2, 2, 0}) {
      const Fit fit = search.decide(least + step, {1'000'000, [] { return false; }});
      CHECK(fit == (step < 0 ? Fit::kNever : Fit::kFits));
    }
  }
}

TEST(the_budget_and_the_stop_request_end_the_search) {
  std::mt19937_64 random(7);
  const std::vector<Buffer> buffers = tight_buffers(400, 200, 100'000, random);
  const Part part = reduce(buffers, rounded_sizes(buffers, 1)).front();
  ExactSearch search(part, {}, 0);
  CHECK(search.decide(part.load, {500, [] { return false; }}) == Fit::kUnknown);
  CHECK_EQ(search.num_nodes(), 500);
  int num_questions = 0;
  CHECK(search.decide(part.load, {1'000'000'000, [&] { return ++num_questions >= 3; }}) == Fit::kUnknown);
  CHECK(num_questions <= 4);
}

OLLA_TEST_MAIN
