#include "buffers.hpp"
#include "olla/layout/greedy/skyline.hpp"

using namespace olla;

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

OLLA_TEST_MAIN
