// Buffers for tests of layouts, and what a layout has to be, straight from the definition.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>

#include "olla/layout/layout.hpp"
#include "test.hpp"

namespace olla {

inline constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(), kMost = std::numeric_limits<std::int64_t>::max();

inline LayoutResult solve(const std::vector<Buffer>& buffers, const LayoutOptions& options = {}, double limit_seconds = 60) {
  Control control("layout", limit_seconds, nullptr);
  return layout(buffers, options, control);
}

inline bool alive(const Buffer& b) { return b.lower < b.upper && b.size > 0; }
inline Bytes rounded(const Buffer& b, Bytes alignment) { return (b.size + alignment - 1) / alignment * alignment; }

// Pair by pair, straight from the definition.
inline void check_layout(const std::vector<Buffer>& buffers, const LayoutResult& result, Bytes alignment) {
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
inline Bytes brute_force(const std::vector<Buffer>& buffers, Bytes alignment) {
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

inline std::vector<Buffer> random_buffers(std::size_t count, std::int64_t horizon, Bytes max_size, std::uint32_t seed) {
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
inline std::vector<Buffer> training_buffers(std::int64_t num_layers, std::uint32_t seed) {
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

// Activations that nest only nearly, temporaries, and gradients kept to the end: the greedy rules end above the load.
inline std::vector<Buffer> hard_buffers(std::uint32_t seed) {
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

}  // namespace olla
