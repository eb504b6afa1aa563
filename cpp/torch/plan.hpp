// The planned addresses of each op's requests, and counters of how they were served.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace olla::replay {

using OpId = std::int32_t;
using Bytes = std::int64_t;
using Offset = std::int64_t;  // first byte of a block in the arena

inline constexpr OpId kNoOp = -1;
inline constexpr Offset kNotInArena = -1;  // planned to come from the default allocator
inline constexpr Bytes kUnknownLoad = std::numeric_limits<Bytes>::max();
inline constexpr std::size_t kMaxMisses = 1000;  // misses kept one by one; all are counted

// Requests of op v are [first[v], first[v + 1]); requests of no bytes do not count. The plan of a loop has one op for each kind of
// iteration.
struct Plan {
  Bytes arena_bytes = 0;
  Bytes alignment = 1;              // of all offsets; load is counted in sizes rounded up to it
  std::vector<std::int64_t> first;  // of num_ops + 1
  std::vector<Bytes> bytes;         // of each request
  std::vector<Offset> offset;       // of each request, kNotInArena where the default allocator answers
  std::vector<Bytes> held{};        // of a loop: bytes of the arena in use at the first request of op v
  std::vector<Bytes> least{};       // of a loop: request k may be as small as least[k]; empty: all are as large as bytes[k]
  Bytes load = kUnknownLoad;        // of a step: most bytes of the arena in use at once

  // varies: the size of request k differs between iterations. fits: a request of this size may take its slot.
  bool varies(std::int64_t k) const { return !least.empty() && least[k] < bytes[k]; }
  bool fits(std::int64_t k, Bytes size) const { return size == bytes[k] || (varies(k) && size >= least[k] && size < bytes[k]); }

  OpId num_ops() const { return static_cast<OpId>(first.size()) - 1; }

  // Throws std::invalid_argument unless every planned block lies in the arena, at a multiple of the device's alignment.
  void check(Bytes device_alignment) const {
    const auto fail = [](const std::string& what) { throw std::invalid_argument("table: " + what); };
    if (arena_bytes < 0) fail("arena_bytes is " + std::to_string(arena_bytes) + ", expected 0 or more");
    if (alignment < device_alignment || alignment % device_alignment != 0)
      fail("alignment is " + std::to_string(alignment) + " bytes, expected a multiple of " + std::to_string(device_alignment));
    if (first.empty() || first.front() != 0 || !std::ranges::is_sorted(first))
      fail("op_offset is not a rising list that starts with 0");
    if (!held.empty() && held.size() + 1 != first.size())
      fail("held has " + std::to_string(held.size()) + " entries, expected " + std::to_string(first.size() - 1) +
           ", one for each op");
    const auto num_requests = static_cast<std::size_t>(first.back());
    if (bytes.size() != num_requests || offset.size() != num_requests)
      fail("num_bytes has " + std::to_string(bytes.size()) + " and offsets has " + std::to_string(offset.size()) +
           " entries, expected " + std::to_string(num_requests) + ", the last of op_offset");
    if (!least.empty() && least.size() != num_requests)
      fail("least has " + std::to_string(least.size()) + " entries, expected " + std::to_string(num_requests) + ", as num_bytes");
    for (std::size_t k = 0; k < num_requests; ++k) {
      const auto fail_at = [&](const std::string& what) {
        fail("request " + std::to_string(k) + " of " + std::to_string(bytes[k]) + " bytes at offset " + std::to_string(offset[k]) +
             what);
      };
      if (bytes[k] < 1) fail_at(" asks for nothing");
      if (!least.empty() && (least[k] < 1 || least[k] > bytes[k]))
        fail_at(" may be as small as " + std::to_string(least[k]) + ", expected 1 to its size");
      if (offset[k] == kNotInArena) continue;
      if (offset[k] < 0 || offset[k] % alignment != 0) fail_at(" is at no multiple of " + std::to_string(alignment));
      if (bytes[k] > arena_bytes - offset[k]) fail_at(" ends outside the arena of " + std::to_string(arena_bytes) + " bytes");
    }
  }
};

struct Miss {
  OpId op;
  std::int32_t index;  // it was the op's request of this number
  Bytes bytes;
  const char* reason;  // "size": no such request is left in the op, "unplanned": none at all is left, "occupied", "stream"
};

struct Counters {
  std::int64_t num_hits = 0;
  std::int64_t num_misses = 0;
  Bytes missed_bytes = 0;
  Bytes requested_bytes = 0;  // in windows: hits, misses, and what was planned to come from the default allocator
  Bytes hit_bytes = 0;
  Bytes peak_bytes = 0;        // most arena bytes in use at once, each block rounded up to the plan's alignment
  Bytes high_water_bytes = 0;  // largest end of a block in the arena, rounded likewise
  Bytes total_peak_bytes = 0;  // of a step: that peak plus the planned blocks of the default allocator, which outlive it
  Bytes given_bytes = 0;       // of a step on a GPU: by the default allocator, in windows and between them
  std::vector<Miss> misses;    // the first kMaxMisses
};

}  // namespace olla::replay
