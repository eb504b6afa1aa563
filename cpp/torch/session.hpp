// What a thread does between the calls that begin and end it: a step that is recorded, a step at planned addresses, or a loop.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arenas.hpp"
#include "plan.hpp"
#include "recording.hpp"
#include "slots.hpp"

namespace olla::replay {

inline constexpr std::int64_t kMaxSkipped = 1000;  // planned requests that a sequence may leave out at once
inline constexpr std::chrono::microseconds kPause{50};
// Pauses of a step, each of about 100 us with what the system adds. On a busy machine, a thread of gloo that lost its core kept
// what it had sent for 3 ms once in 300 collectives. The steps after one that waited in vain have little patience.
inline constexpr int kPatience = 1000, kLittlePatience = 50;
inline constexpr std::size_t kContext = 4;  // latest sizes that tell where a sequence goes on

// The call does not fit the state: a window inside a window, a second table, another thread.
struct StateError : std::logic_error {
  using std::logic_error::logic_error;
};

// An arena that is not there yet.
struct Awaited {
  std::int64_t place;  // of the work that it is for
  bool no_more;        // none, if the process takes more memory with it than so far
};

struct Session {
  bool recording = false;    // beside what it plans
  bool is_loop = false;      // records all the time, and has a plan once there is one
  bool shared = false;       // a loop: with all threads that have no session of their own
  std::size_t device = 0;    // whose requests it has
  Session* outer = nullptr;  // of the same thread: a loop that waits until this step is over
  OpId num_ops = 0;
  OpId op = kNoOp;                       // whose window is open; of a loop the number of the iteration
  OpId row = kNoOp;                      // the op of the plan that the window follows; kNoOp: no request of a loop has told so far
  std::int32_t index = 0;                // of its next request
  int patience = 0;                      // pauses that are left to wait for blocks that other threads or streams free late
  Bytes outlasting = 0;                  // of a step: asked for so far of what outlives it, from the default allocator
  std::int64_t next = 0;                 // first planned request that has not been passed
  bool exact = true;                     // all requests of the window came as planned for `row` so far
  std::array<Bytes, kContext> recent{};  // sizes of the latest requests of a loop's window, the last one at the end
  std::vector<Bytes> asked{};            // of a loop: the sizes so far, as long as all came as planned
  std::vector<Slots::Held> held{};       // of a loop: blocks in the arena when the first request of the window came
  Plan plan{};
  std::int64_t plan_number = 0;  // of a loop: tells its plan from all others of the process; 0: none
  Arena* arena = nullptr;
  std::optional<Awaited> awaited{};  // of a loop: the arena that its first request takes
  std::exception_ptr failure{};      // what came instead of it
  Counters counters{};
  Recording recorded{};

  // Opens the window. The iteration of a loop says with its first request which kind it is.
  void enter(OpId entered) {
    op = entered;
    index = 0;
    recent.fill(0);
    exact = true;
    asked.clear();
    held.clear();
    row = kNoOp;
    if (recording) recorded.start_op(op);
    if (!is_loop && plan.num_ops() > 0) follow(op);
  }

  // The number of the planned request that one of this size takes, or `last`: none.
  std::int64_t find(Bytes bytes) {
    if (row == kNoOp) choose();
    const std::int64_t last = plan.first[row + 1];
    return is_loop ? find_in_sequence(bytes, last) : find_next(bytes, last);
  }
  std::int64_t last() const { return plan.first[row + 1]; }

 private:
  void follow(OpId chosen) {
    row = chosen;
    next = plan.first[row];
  }

  // What is in use tells an iteration that, say, finds gradients from one that does not, before any request does.
  void choose() {
    held = arena->slots.held();
    const Bytes used = arena->slots.used_bytes();
    const auto distance = [&](Bytes expected) { return std::abs(expected - used); };
    follow(static_cast<OpId>(std::ranges::min_element(plan.held, {}, distance) - plan.held.begin()));
  }

  // Another op of the plan that begins as this window did and goes on with this size. O(requests so far).
  bool change(Bytes bytes) {
    const auto done = static_cast<std::int64_t>(asked.size());
    for (OpId v = 0; v < plan.num_ops(); ++v) {
      const std::int64_t first = plan.first[v];
      if (first + done >= plan.first[v + 1] || !plan.fits(first + done, bytes)) continue;
      std::int64_t i = 0;
      while (i < done && plan.fits(first + i, asked[i])) ++i;
      if (i < done) continue;
      row = v;
      next = first + done;
      return true;
    }
    return false;
  }

  // A request more or less than planned must not shift all that follow: the next one of this size.
  std::int64_t find_next(Bytes bytes, std::int64_t last) const {
    return std::find(plan.bytes.begin() + next, plan.bytes.begin() + last, bytes) - plan.bytes.begin();
  }

  // In a long window the next one of this size may lie far ahead, and going there would pass all between. So a request of another
  // size counts as one more than planned, unless it is larger than those that its place was planned for, or it and those before it
  // show where the sequence goes on. O(kMaxSkipped).
  std::int64_t find_in_sequence(Bytes bytes, std::int64_t last) {
    std::ranges::rotate(recent, recent.begin() + 1);
    recent.back() = bytes;
    if ((next < last && plan.fits(next, bytes)) || (exact && change(bytes))) {
      if (exact) asked.push_back(bytes);
      return next;
    }
    exact = false;
    if (next < last && plan.varies(next) && bytes > plan.bytes[next]) {
      ++next;
      return last;
    }
    return find_alike(last);
  }

  // The planned request that ends the longest run of sizes like the latest ones, two or more of which one is always the same, and
  // of those the nearest. It may lie behind: a run that occurs several times can lead too far ahead, and the requests that follow
  // tell. It may belong to another op, where that has a longer one. Or `last`: none.
  std::int64_t find_alike(std::int64_t last) {
    const std::int64_t done = next - plan.first[row];
    std::int64_t found = last, longest = 1, nearest = 0;
    const auto search = [&](OpId v) {
      const std::int64_t begin = plan.first[v], expected = begin + done;
      const std::int64_t before = longest, end = std::min(plan.first[v + 1], expected + kMaxSkipped);
      for (std::int64_t k = std::max(begin, expected - kMaxSkipped); k < end; ++k) {
        const auto most = std::min<std::int64_t>(kContext, k + 1 - begin);
        std::int64_t alike = 0;
        bool is_known = false;  // by a size that is always the same
        for (; alike < most && plan.fits(k - alike, recent[kContext - 1 - alike]); ++alike) is_known |= !plan.varies(k - alike);
        const std::int64_t distance = std::abs(k - expected);
        if (!is_known || alike <= before || alike < longest || (alike == longest && distance >= nearest)) continue;
        found = k, longest = alike, nearest = distance, row = v;
      }
    };
    const OpId own = row;
    search(own);
    for (OpId v = 0; v < plan.num_ops(); ++v)
      if (v != own) search(v);
    return found;
  }
};

}  // namespace olla::replay
