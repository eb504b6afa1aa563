#include "olla/swap/timeline.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "olla/base/error.hpp"
#include "olla/base/lists.hpp"

namespace olla {
namespace {

void require_valid(const Steps& steps, std::span<const Swap> swaps) {
  if (steps.seconds.size() != steps.live.size()) throw PlanError("a swap timeline needs one time per step", "swap", {});
  const Step n = steps.num();
  Step ready = -1;  // a copy waits for those before it on its stream
  for (std::size_t i = 0; i < swaps.size(); ++i) {
    const Swap& s = swaps[i];
    ready = std::max(ready, s.ready);
    const bool halves = (s.last < 0 && (ready >= 0 || s.next == n)) || (s.next == n && s.issue != n);
    if (s.bytes < 0 || s.ready < -1 || (s.ready < 0) != (s.last < 0) || s.ready > s.last || s.last >= s.issue || s.issue > s.next ||
        s.next > n || halves || ready >= s.issue)
      throw PlanError("swap " + std::to_string(i) + " is out of its range: ready " + std::to_string(s.ready) + " (" +
                          std::to_string(ready) + " with those before it), last " + std::to_string(s.last) + ", issue " +
                          std::to_string(s.issue) + ", next " + std::to_string(s.next) + " of " + std::to_string(steps.num()) +
                          " steps",
                      "swap", {static_cast<std::int64_t>(i)});
  }
}

class Simulation {
 public:
  Simulation(const Steps& steps, std::span<const Swap> swaps, const Link& link, Bytes limit)
      : steps_(steps), swaps_(swaps), link_(link), limit_(limit), state_(swaps.size(), 0) {
    by_last_ = sorted_by(swaps.size(), [&](std::int32_t i) { return swaps[i].last; });
    by_issue_ = sorted_by(swaps.size(), [&](std::int32_t i) { return std::pair(swaps[i].issue, swaps[i].next); });
    by_next_ = sorted_by(swaps.size(), [&](std::int32_t i) { return swaps[i].next; });
    for (auto* times : {&t_.out_start, &t_.out_end, &t_.in_start, &t_.in_end}) times->resize(swaps.size());
    t_.freed.resize(swaps.size());
    for (std::size_t i = 0; i < swaps.size(); ++i) t_.freed[i] = swaps[i].issue;
    t_.start.resize(steps.live.size());
    t_.live.resize(steps.live.size());
  }

  Timeline run() {
    for (; num_copied_ < swaps_.size() && swaps_[num_copied_].last < 0; ++num_copied_) {  // in host memory from the start
      state_[num_copied_] = kCopied | kPassed;
      leave(static_cast<std::int32_t>(num_copied_), 0);
    }
    num_started_ = num_passed_ = num_copied_;
    for (Step s = 0; s < steps_.num(); ++s) step(s);
    for (std::size_t i = 0; i < swaps_.size(); ++i)
      if (swaps_[i].next == steps_.num()) now_ = std::max(now_, t_.out_end[i]);
    for (std::size_t i = 0; i < swaps_.size(); ++i)
      if (swaps_[i].next == steps_.num()) t_.in_start[i] = t_.in_end[i] = now_;
    const double busy = std::accumulate(steps_.seconds.begin(), steps_.seconds.end(), 0.0);
    t_.stall_seconds = std::max(0.0, now_ - busy);
    measure_host();
    return std::move(t_);
  }

 private:
  enum : std::uint8_t { kCopied = 1, kPassed = 2, kIssued = 4 };  // copy out ended; last use ended; copy in issued

  void step(Step s) {
    while (num_passed_ < swaps_.size() && swaps_[by_last_[num_passed_]].last < s) pass(by_last_[num_passed_++], s);
    const std::size_t first_issued = num_issued_;
    while (num_issued_ < swaps_.size() && swaps_[by_issue_[num_issued_]].issue == s) issue(by_issue_[num_issued_++]);
    while (num_copied_ < num_started_ && t_.out_end[num_copied_] <= now_) copied(s);
    while (steps_.live[s] - absent_ > limit_ && waiting_ > 0) {
      now_ = std::max(now_, t_.out_end[num_copied_]);
      copied(s);
    }
    t_.live[s] = steps_.live[s] - absent_;
    for (std::size_t k = first_issued; k < num_issued_; ++k) copy_in(by_issue_[k]);
    for (; num_used_ < swaps_.size() && swaps_[by_next_[num_used_]].next == s; ++num_used_)
      now_ = std::max(now_, t_.in_end[by_next_[num_used_]]);
    t_.start[s] = now_;
    now_ += steps_.seconds[s];
    if (t_.live[s] > t_.peak) t_.peak = t_.live[s], t_.peak_step = s;
    for (; num_started_ < swaps_.size() && swaps_[num_started_].ready <= s; ++num_started_) copy_out(num_started_);
  }

  void copy_out(std::size_t i) {
    t_.out_start[i] = std::max(out_free_, now_);
    out_free_ = t_.out_end[i] = t_.out_start[i] + link_.out_seconds(swaps_[i].bytes);
    if (state_[i] & kPassed) waiting_ += swaps_[i].bytes;
  }

  void copy_in(std::int32_t i) {
    t_.in_start[i] = std::max({in_free_, now_, t_.out_end[i]});
    in_free_ = t_.in_end[i] = t_.in_start[i] + link_.in_seconds(swaps_[i].bytes);
  }

  void pass(std::int32_t i, Step s) {
    state_[i] |= kPassed;
    if (state_[i] & kCopied)
      leave(i, s);
    else if (static_cast<std::size_t>(i) < num_started_)
      waiting_ += swaps_[i].bytes;
  }

  void copied(Step s) {
    const std::size_t i = num_copied_++;
    if (state_[i] == kPassed) {
      waiting_ -= swaps_[i].bytes;
      leave(static_cast<std::int32_t>(i), s);
    }
    state_[i] |= kCopied;
  }

  void leave(std::int32_t i, Step s) {
    absent_ += swaps_[i].bytes;
    t_.freed[i] = s;
  }

  void issue(std::int32_t i) {
    if (state_[i] & kCopied)
      absent_ -= swaps_[i].bytes;  // it has left: its last use is over by now
    else
      waiting_ -= swaps_[i].bytes;
    state_[i] |= kIssued;
  }

  void measure_host() {
    std::vector<std::pair<double, Bytes>> events;  // at one time, what goes comes first: negative
    for (std::size_t i = 0; i < swaps_.size(); ++i) {
      events.emplace_back(t_.out_start[i], swaps_[i].bytes);
      events.emplace_back(t_.in_end[i], -swaps_[i].bytes);
    }
    std::sort(events.begin(), events.end());
    Bytes held = 0;
    for (const auto& [time, bytes] : events) t_.host_bytes = std::max(t_.host_bytes, held += bytes);
  }

  const Steps& steps_;
  std::span<const Swap> swaps_;
  const Link& link_;
  Bytes limit_;
  std::vector<std::uint8_t> state_;
  std::vector<std::int32_t> by_last_, by_issue_, by_next_;
  std::size_t num_passed_ = 0, num_issued_ = 0, num_used_ = 0, num_started_ = 0, num_copied_ = 0;
  Bytes absent_ = 0;   // bytes in host memory alone
  Bytes waiting_ = 0;  // bytes being copied out after their last use
  double now_ = 0, out_free_ = 0, in_free_ = 0;
  Timeline t_;
};

}  // namespace

Timeline swap_timeline(const Steps& steps, std::span<const Swap> swaps, const Link& link, Bytes limit) {
  require_valid(steps, swaps);
  return Simulation(steps, swaps, link, limit).run();
}

void issue_backwards(const Steps& steps, std::span<Swap> swaps, const Link& link, Bytes limit) {
  const Step n = steps.num();
  const std::vector<Bytes> live(steps.live.rbegin(), steps.live.rend());
  const std::vector<double> seconds(steps.seconds.rbegin(), steps.seconds.rend());
  // Backwards, copies in become copies out, and the mirrored copies in take no time.
  const Link back{link.in_bytes_per_second, link.in_latency_seconds, 1e30, 0.0};
  std::vector<std::int32_t> ids = sorted_by(swaps.size(), [&](std::int32_t i) { return std::pair(-swaps[i].next, swaps[i].last); });
  std::erase_if(ids, [&](std::int32_t i) { return swaps[i].next == n; });
  std::vector<Swap> mirrored;
  for (const std::int32_t i : ids) {
    const Swap& s = swaps[i];
    const Step end = n - 1 - s.last;
    mirrored.push_back({s.bytes, n - 1 - s.next, n - 1 - s.next, end, end});
  }
  const Timeline t = swap_timeline({live, seconds}, mirrored, back, limit);
  for (std::size_t k = 0; k < ids.size(); ++k) {
    Swap& s = swaps[ids[k]];
    s.issue = std::clamp(n - t.freed[k], s.last + 1, s.next);
  }
}

}  // namespace olla
