// Blocks copied to host memory while nobody uses them: when the copies run beside the ops of an order, and what that frees and
// costs.
//
// Ops run one after the other. Copies out run in a given order on a stream of their own, copies in on another, in the order in
// which they are issued. A copy out starts once the op that made the block's value has ended; the block is free once the copy and
// the last op that uses it have ended. A copy in is issued when the ops reach a given step; from that step on the block takes
// memory again. An op waits for the blocks it uses, and for copies out while more than the limit is live.
#pragma once

#include "olla/base/types.hpp"

namespace olla {

// How fast copies are, each way, both at once.
struct Link {
  double out_bytes_per_second, out_latency_seconds;
  double in_bytes_per_second, in_latency_seconds;
  double out_seconds(Bytes bytes) const { return static_cast<double>(bytes) / out_bytes_per_second + out_latency_seconds; }
  double in_seconds(Bytes bytes) const { return static_cast<double>(bytes) / in_bytes_per_second + in_latency_seconds; }
};

// A block that leaves between two uses. ready <= last < issue <= next. Two kinds have one copy only: with ready = last = -1 the
// block is in host memory when the step starts; with issue = next = number of steps it is there when the step ends, which waits for
// that.
struct Swap {
  Bytes bytes;
  Step ready;  // the copy out may start once this op has ended
  Step last;   // the last op that uses it before
  Step issue;  // the copy in is issued when this op is reached
  Step next;   // the first op that uses it after
};

// The steps of an order: memory live at each without swaps, and its time.
struct Steps {
  std::span<const Bytes> live;
  std::span<const double> seconds;
  Step num() const { return static_cast<Step>(live.size()); }
};

struct Timeline {
  std::vector<double> start;                                 // of op s
  std::vector<double> out_start, out_end, in_start, in_end;  // of swap i
  std::vector<Step> freed;                                   // of swap i: the first op that runs without it; issue if none does
  std::vector<Bytes> live;                                   // during op s
  Bytes peak = 0;
  Step peak_step = 0;
  double stall_seconds = 0;  // the ops' waiting time
  Bytes host_bytes = 0;      // most in host memory at once: from the start of the copy out to the end of the copy in
};

inline constexpr Bytes kNoLimit = kMaxBytes;

// Runs the swaps, whose order is that of the copies out (what is in host memory from the start comes first), beside the ops. Where
// nothing can be waited for, an op runs above the limit. Throws PlanError "swap" (index of the swap) where one is out of its range,
// or its copy in would be issued before its copy out can start. O(steps + swaps log swaps).
Timeline swap_timeline(const Steps& steps, std::span<const Swap> swaps, const Link& link, Bytes limit);

// Sets every swap's issue step: the latest at which the copies in, one after the other on their stream, make no op wait; later
// where more than the limit would be live otherwise. The simulation above, run backwards in time. O(steps + swaps log swaps).
void issue_backwards(const Steps& steps, std::span<Swap> swaps, const Link& link, Bytes limit);

}  // namespace olla
