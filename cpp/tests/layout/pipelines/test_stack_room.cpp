#include <numeric>

#include "olla/layout/pipelines/stack_room.hpp"
#include "packings.hpp"

using namespace olla;

namespace {

std::vector<Bytes> five_sizes(std::mt19937& random) {
  std::vector<Bytes> sizes;
  for (int k = 0; k < 5; ++k) sizes.push_back(5 + static_cast<Bytes>(random() % 30));
  return sizes;
}

// Stacks that follow each other in one room, and a byte of scratch all the time.
std::vector<Buffer> one_after_the_other(const std::vector<Bytes>& sizes, std::int64_t num_stacks) {
  std::vector<Buffer> buffers;
  const auto count = static_cast<std::int64_t>(sizes.size());
  for (std::int64_t s = 0; s < num_stacks; ++s) {
    const std::int64_t begin = 4 * count * s;
    for (std::int64_t k = 0; k < count; ++k) {
      buffers.push_back({begin + k, begin + 4 * count - 1 - k, sizes[static_cast<std::size_t>(k)]});
    }
    for (std::int64_t t = 0; t < 4 * count; ++t) buffers.push_back({begin + t, begin + t + 1, 1});
  }
  return buffers;
}

// Some of all but the last item fill a slot to within what is to spare.
bool has_sum(const std::vector<Bytes>& sizes, bool with_last, Bytes room, Bytes spare) {
  for (std::size_t set = 0; set < std::size_t{1} << (sizes.size() - 1); ++set) {
    Bytes sum = with_last ? sizes.back() : 0;
    for (std::size_t k = 0; k + 1 < sizes.size(); ++k) sum += (set >> k & 1) != 0 ? sizes[k] : 0;
    if (sum <= room && sum >= room - spare) return true;
  }
  return false;
}

// The hole comes to the first slot and leaves from the second, or stays: of which widths of the first slot all the stacks fill it.
// What is born last lies in the host, or where the hole comes next.
bool is_possible(const std::vector<Bytes>& sizes, const std::vector<bool>& crosses, Bytes hole, Bytes spare) {
  const Bytes total = std::accumulate(sizes.begin(), sizes.end(), Bytes{0}) + spare;
  for (Bytes first = 0; first <= total; ++first) {
    Bytes width = first;
    bool fits = has_sum(sizes, false, total - width, spare);
    for (const bool crosses_it : crosses) {
      if (!fits) break;
      if (crosses_it) width += hole;
      fits = width <= total && (crosses_it ? has_sum(sizes, false, width, spare) || has_sum(sizes, true, width, spare)
                                           : has_sum(sizes, false, total - width, spare));
    }
    if (fits) return true;
  }
  return false;
}

}  // namespace

TEST(stacks_fill_their_room_around_the_hole) {
  std::mt19937 random(1);
  int num_planned = 0, num_impossible = 0;
  for (int round = 0; round < 300; ++round) {
    const std::vector<Bytes> sizes = five_sizes(random);
    const Bytes hole = 4 + static_cast<Bytes>(random() % 12), spare = static_cast<Bytes>(random() % 3);
    const std::int64_t num_stacks = 2 + static_cast<std::int64_t>(random() % 3);
    const Part part = one_part(one_after_the_other(sizes, num_stacks));
    const Floor floor = find_floor(part);
    StackNeeds needs(part, floor, find_stacks(part, floor, 2));
    CHECK_EQ(std::ssize(needs.stacks()), num_stacks);
    needs.begin(1000);  // nothing is tight
    StackRoom room(part, needs, static_cast<std::uint64_t>(round));
    room.begin(0);
    std::vector<Tenancy> tenancies;
    std::vector<bool> crosses;
    for (std::int32_t s = 0; s < num_stacks; ++s) {
      tenancies.push_back({s, {}, {0, true, hole}, {}, {}});
      if (s == 0) continue;
      crosses.push_back(random() % 2 == 0);
      tenancies.back().birth = {crosses.back() ? 1 : 0, true, hole};
    }
    const bool is_planned = room.plan(tenancies, 2, spare, 3000, [] { return false; });
    num_planned += is_planned;
    if (!is_planned) {
      num_impossible += !is_possible(sizes, crosses, hole, spare);
      continue;
    }
    for (std::size_t k = 0; k < tenancies.size(); ++k) {
      const Tenancy& tenancy = tenancies[k];
      CHECK_EQ(std::accumulate(tenancy.widths.begin(), tenancy.widths.end(), Bytes{0}), room.bytes(tenancy.stack) + spare);
      CHECK_EQ(tenancy.places.size(), sizes.size());
      for (const Tenancy::Place& a : tenancy.places) {
        const Bytes end = a.at + part.items[a.item].size;
        CHECK(a.at >= 0 && end <= tenancy.widths[static_cast<std::size_t>(a.slot)]);
        for (const Tenancy::Place& b : tenancy.places) {
          CHECK(a.item == b.item || a.slot != b.slot || end <= b.at || b.at + part.items[b.item].size <= a.at);
        }
      }
      // What does not take the hole keeps its slots; what does, takes it where it comes and leaves it where it goes.
      if (k == 0) continue;
      const Bytes first = tenancies[k - 1].widths[0];
      CHECK_EQ(tenancy.widths[0], crosses[k - 1] ? first + hole : first);
    }
  }
  CHECK(num_planned > 20);
  CHECK(num_impossible > 20);
}

TEST(what_can_be_filled_is_found) {
  std::mt19937 random(2);
  int num_possible = 0, num_planned = 0;
  for (int round = 0; round < 200; ++round) {
    const std::vector<Bytes> sizes = five_sizes(random);
    const Bytes hole = 4 + static_cast<Bytes>(random() % 12);
    const Part part = one_part(one_after_the_other(sizes, 2));
    const Floor floor = find_floor(part);
    StackNeeds needs(part, floor, find_stacks(part, floor, 2));
    needs.begin(1000);
    StackRoom room(part, needs, 1);
    room.begin(0);
    std::vector<Tenancy> tenancies{{0, {}, {0, true, hole}, {}, {}}, {1, {1, true, hole}, {0, true, hole}, {}, {}}};
    const bool is_planned = room.plan(tenancies, 2, 0, 3000, [] { return false; }), can = is_possible(sizes, {true}, hole, 0);
    CHECK(!is_planned || can);
    num_possible += can;
    num_planned += is_planned;
  }
  CHECK(num_possible > 20);
  CHECK(20 * num_planned >= 19 * num_possible);
}

TEST(large_stacks_are_planned_and_stops_heard) {
  std::vector<Bytes> sizes;
  for (int k = 0; k < 24; ++k) sizes.push_back(20 + 7 * k % 31);
  const Part part = one_part(one_after_the_other(sizes, 3));
  const Floor floor = find_floor(part);
  StackNeeds needs(part, floor, find_stacks(part, floor, 2));
  needs.begin(10'000);
  StackRoom room(part, needs, 1);
  room.begin(0);
  std::vector<Tenancy> tenancies;
  for (std::int32_t s = 0; s < 3; ++s) {
    tenancies.push_back({s, {s == 0 ? -1 : s % 2, true, 40}, {s == 2 ? -1 : 0, true, 40}, {}, {}});
  }
  std::vector<Tenancy> stopped = tenancies;
  CHECK(!room.plan(stopped, 2, 0, 64, [] { return true; }));
  CHECK(room.plan(tenancies, 2, 0, 3000, [] { return false; }));
}

OLLA_TEST_MAIN
