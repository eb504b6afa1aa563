// The state of a thread's step or loop. A step is recorded, served at planned addresses, or both; a loop is always recorded.
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
// Pauses a step may make, each about 100 us including scheduling. On a busy machine, a preempted thread of gloo kept sent data
// for 3 ms once in 300 collectives. The step after one that used up its patience gets little.
inline constexpr int kPatience = 1000, kLittlePatience = 50;
inline constexpr std::size_t kContext = 4;  // latest request sizes, used to find the position in the plan

// The call does not fit the state: a window inside a window, a second table, another thread.
struct StateError : std::logic_error {
  using std::logic_error::logic_error;
};

// An arena still to be taken.
struct Awaited {
  std::int64_t place;  // of the work that it is for
  bool no_more;        // fail rather than raise the peak of reserved memory
};

struct Session {
  bool recording = false;    // in addition to serving planned addresses, if any
  bool is_loop = false;      // always records; has a plan once plan_loop() sets one
  bool shared = false;       // of a loop: serves all threads without a session of their own
  std::size_t device = 0;    // whose requests it serves
  Session* outer = nullptr;  // of the same thread: a loop that waits until this step is over
  OpId num_ops = 0;
  OpId op = kNoOp;                       // whose window is open; of a loop the number of the iteration
  OpId row = kNoOp;                      // the plan's op that the window follows; kNoOp: a loop before its first request
  std::int32_t index = 0;                // of its next request
  int patience = 0;                      // pauses that are left to wait for blocks that other threads or streams free late
  Bytes outlasting = 0;                  // of a step: bytes requested so far for blocks of the default allocator that outlive it
  std::int64_t next = 0;                 // first planned request that has not been passed
  bool exact = true;                     // all requests of the window came as planned for `row` so far
  std::array<Bytes, kContext> recent{};  // sizes of the latest requests of a loop's window, the last one at the end
  std::vector<Bytes> asked{};            // of a loop: the sizes so far, as long as all came as planned
  std::vector<Slots::Held> held{};       // of a loop: blocks in the arena when the first request of the window came
  Plan plan{};
  std::int64_t plan_number = 0;  // of a loop: tells its plan from all others of the process; 0: none
  Arena* arena = nullptr;
  std::optional<Awaited> awaited{};  // of a loop: the arena that its first request takes
  std::exception_ptr failure{};      // the error if there was no room for it
  Counters counters{};
  Recording recorded{};

  // Opens the window. A loop chooses its row of the plan at the first request of the iteration.
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

  // The index of the planned request that a request of this size takes, or last() if none.
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

  // Chooses the row whose bytes in use at the start are closest to those now: this tells, say, iterations that find gradients
  // from those that do not, before any request does.
  void choose() {
    held = arena->slots.held();
    const Bytes used = arena->slots.used_bytes();
    const auto distance = [&](Bytes expected) { return std::abs(expected - used); };
    follow(static_cast<OpId>(std::ranges::min_element(plan.held, {}, distance) - plan.held.begin()));
  }

  // Switches to a row of the plan that begins with the window's requests so far and goes on with this size. O(requests so far).
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

  // The next planned request of this size: one request more or less than planned must not shift all that follow.
  std::int64_t find_next(Bytes bytes, std::int64_t last) const {
    return std::find(plan.bytes.begin() + next, plan.bytes.begin() + last, bytes) - plan.bytes.begin();
  }

  // In a long window the next planned request of this size may lie far ahead, and jumping there would skip all between. So a
  // request of another size than the next planned one is unplanned, unless it and those before it show where the sequence goes
  // on. One larger than a next request of varying size is unplanned too, but uses that one up. O(kMaxSkipped).
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

  // Finds the position by the latest sizes: the planned request that ends the longest matching run of at least two, one of them
  // of constant size; the nearest of several. It may lie behind `next`: a run that occurs several times can lead too far ahead,
  // and later requests correct that. It may lie in another row, if its run is longer. `last` if there is none.
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
