#include "olla/layout/greedy/best_fit.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "olla/base/error.hpp"
#include "olla/base/lists.hpp"
#include "olla/layout/problem/packing.hpp"

namespace olla {
namespace {

constexpr std::int64_t kStopInterval = 1024;  // placements between two looks at the clock

// The hole that suits best among those seen so far, holes coming by rising offset.
class HoleSearch {
 public:
  HoleSearch(Bytes size, Hole rule) : size_(size), rule_(rule) {}

  // The next bytes in use at some time of the buffer's life.
  void pass(Offset begin, Offset end) {
    const Bytes hole = begin - top_;
    if (hole >= size_ && hole < best_ && !done()) {
      best_ = hole;
      offset_ = top_;
    }
    top_ = std::max(top_, end);
  }
  bool done() const { return best_ == size_ || (rule_ == Hole::kLowest && offset_ != kNotInArena); }
  Offset offset() const { return offset_ == kNotInArena ? top_ : offset_; }
  Bytes size() const { return size_; }

 private:
  Bytes size_;
  Hole rule_;
  Bytes best_ = std::numeric_limits<Bytes>::max();
  Offset offset_ = kNotInArena;
  Offset top_ = 0;
};

// A buffer's lifetime as ranks among all birth and death times: half as much memory to scan.
struct Life {
  std::int32_t lower, upper;
};

std::vector<Life> lives(std::span<const Buffer> buffers) {
  std::vector<std::int64_t> times;
  for (const Buffer& b : buffers) times.insert(times.end(), {b.lower, b.upper});
  sort_unique(times);
  const auto rank = [&](std::int64_t time) {
    return static_cast<std::int32_t>(std::ranges::lower_bound(times, time) - times.begin());
  };
  std::vector<Life> result;
  for (const Buffer& b : buffers) result.push_back({rank(b.lower), rank(b.upper)});
  return result;
}

// Placed buffers by offset, in chunks. A search passes over chunks of which no buffer is alive, or all are and leave no hole that
// is large enough. It opens few others, and scans the lives in them some sixteen at a time.
class PlacedBuffers {
 public:
  PlacedBuffers() : chunks_(1) {}

  void insert(Life life, Offset begin, Bytes size) {
    auto chunk = std::ranges::upper_bound(chunks_, begin, {}, [](const Chunk& c) { return c.begin.empty() ? 0 : c.begin.front(); });
    if (chunk != chunks_.begin()) --chunk;
    if (chunk->begin.size() == kChunkSize) {
      chunks_.insert(chunk + 1, chunk->split());
      chunk = std::ranges::upper_bound(chunks_, begin, {}, [](const Chunk& c) { return c.begin.front(); });
      if (chunk != chunks_.begin()) --chunk;
    }
    chunk->insert(life, begin, begin + size);
  }

  void search(Life life, HoleSearch& search) const {
    for (const Chunk& c : chunks_) {
      if (search.done()) return;
      if (c.max_upper <= life.lower || c.min_lower >= life.upper) continue;
      if (c.max_lower < life.upper && c.min_upper > life.lower && c.largest_hole < search.size()) {
        search.pass(c.begin.front(), c.last_end);
      } else {
        c.open(life, search);
      }
    }
  }

 private:
  static constexpr std::size_t kChunkSize = 128;
  static constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

  struct Chunk {
    std::vector<std::int32_t> lower, upper;
    std::vector<Offset> begin, end;  // begin never falls
    std::int32_t min_lower = kMost, max_lower = 0, min_upper = kMost, max_upper = 0;
    Offset last_end = 0;
    Bytes largest_hole = 0;  // between its buffers, if all are alive

    void insert(Life life, Offset first, Offset last) {
      const auto at = std::ranges::upper_bound(begin, first) - begin.begin();
      lower.insert(lower.begin() + at, life.lower);
      upper.insert(upper.begin() + at, life.upper);
      begin.insert(begin.begin() + at, first);
      end.insert(end.begin() + at, last);
      summarize();
    }

    Chunk split() {  // the upper half
      Chunk other;
      const auto move_half = [](auto& from, auto& to) {
        to.assign(from.begin() + kChunkSize / 2, from.end());
        from.resize(kChunkSize / 2);
      };
      move_half(lower, other.lower);
      move_half(upper, other.upper);
      move_half(begin, other.begin);
      move_half(end, other.end);
      summarize();
      other.summarize();
      return other;
    }

    void summarize() {
      std::tie(min_lower, max_lower) = std::pair(std::ranges::min(lower), std::ranges::max(lower));
      std::tie(min_upper, max_upper) = std::pair(std::ranges::min(upper), std::ranges::max(upper));
      last_end = begin.front();
      largest_hole = 0;
      for (std::size_t i = 0; i < begin.size(); ++i) {
        largest_hole = std::max(largest_hole, begin[i] - last_end);
        last_end = std::max(last_end, end[i]);
      }
    }

    void open(Life life, HoleSearch& search) const {
      std::array<std::uint8_t, kChunkSize> alive{};
      for (std::size_t i = 0; i < begin.size(); ++i) alive[i] = (lower[i] < life.upper) & (upper[i] > life.lower);
      for (std::size_t i = 0; i < begin.size(); i += sizeof(std::uint64_t)) {
        std::uint64_t any = 0;
        std::memcpy(&any, &alive[i], sizeof any);
        for (std::size_t j = i; any != 0 && j < i + sizeof any; ++j) {
          if (alive[j] != 0) search.pass(begin[j], end[j]);
        }
      }
    }
  };

  std::vector<Chunk> chunks_;  // only a single one may be empty
};

}  // namespace

FitResult fit_in_order(std::span<const Buffer> buffers, std::span<const std::int32_t> order, Hole rule, Bytes alignment,
                       Control& control) {
  const std::vector<Bytes> sizes = rounded_sizes(buffers, alignment);
  std::vector<std::uint8_t> seen(buffers.size(), 0);
  for (const std::int32_t i : order) {
    const bool known = i >= 0 && static_cast<std::size_t>(i) < buffers.size();
    if (!known || std::exchange(seen[i], 1) != 0 || order.size() != buffers.size()) {
      throw PlanError("best fit: the order is no permutation of the buffers", "permutation", {i});
    }
  }
  FitResult result;
  result.offsets.assign(buffers.size(), 0);
  const std::vector<Life> life = lives(buffers);
  PlacedBuffers placed;
  std::int64_t num_placed = 0;
  bool stopped = false;
  for (const std::int32_t i : order) {
    const Buffer& buffer = buffers[i];
    if (buffer.lower >= buffer.upper || sizes[i] == 0) continue;
    stopped = stopped || (num_placed++ % kStopInterval == 0 && control.stop(result.height, 0));
    if (stopped) {
      result.offsets[i] = result.height;
    } else {
      HoleSearch search(sizes[i], rule);
      placed.search(life[i], search);
      result.offsets[i] = search.offset();
      placed.insert(life[i], result.offsets[i], sizes[i]);
    }
    result.height = std::max(result.height, result.offsets[i] + sizes[i]);
  }
  return result;
}

std::vector<std::int32_t> smartpool_order(std::span<const Buffer> buffers, std::span<const std::uint8_t> outlives) {
  if (outlives.size() != buffers.size()) throw PlanError("best fit: one outlives per buffer is needed", "lengths", {});
  // ~: the greatest first; unlike -, it has no overflow.
  return sorted_by(buffers.size(), [&](std::int32_t i) { return std::tuple(~outlives[i], ~buffers[i].size, buffers[i].lower); });
}

}  // namespace olla
