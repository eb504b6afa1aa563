// Work on streams: queued, and run as late or as early as CUDA's rules allow, so that a missing wait gives other numbers.
//
// Schedules:
//   now        all work runs when it is queued: the order of the program
//   late       work runs once the host waits for it, and of other streams only what it waits for
//   early      the work of side streams runs as soon as what they wait for has, that of default streams is late
//   random:N   after each call some streams run some of their work, drawn with seed N
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "device.hpp"

namespace standin {

using Ticket = std::uint64_t;  // work of a lane, counted from 1

// A piece of work, or a wait for another lane (then `run` is empty).
struct Lane;
struct Work {
  std::function<void()> run;
  Lane* after = nullptr;
  Ticket ticket = 0;
};

// Work that runs in order: of a stream, or of a stream's part in a graph.
struct Lane {
  std::deque<Work> queue;
  Ticket issued = 0;
  Ticket done = 0;

  Ticket add(Work work);
};

// Runs a lane up to a ticket, and of others what that waits for.
void run_until(Lane& lane, Ticket ticket);

// What a capture holds so far: a lane for each stream in it. Nothing of it runs.
struct Capture {
  unsigned long long id;
  struct Stream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool valid = true;
  std::map<struct Stream*, Lane> lanes;
};

struct Stream : Lane {
  int device = 0;
  int priority = 0;
  bool is_default = false;
  std::shared_ptr<Capture> capture;
};

struct Event {
  int device = 0;
  Lane* lane = nullptr;  // that it was recorded on last; nullptr: never
  Ticket ticket = 0;
  std::shared_ptr<Capture> capture;  // that it was recorded in
};

Stream& stream_of(cudaStream_t handle);
const std::vector<std::unique_ptr<Stream>>& all_streams();
std::map<unsigned long long, std::shared_ptr<Capture>>& captures();

// Queues work on a stream, or in the capture that the stream is part of.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work, const char* name);

// Whether a call that may wait for the device is refused because of a capture, which it then invalidates.
bool refused_by_capture(const char* call);
#define REFUSED_IN_CAPTURE() \
  if (::standin::refused_by_capture(__func__)) RETURN(cudaErrorStreamCaptureUnsupported)

// All work of all streams is over.
void run_all();

// For graphs: runs lanes of their own to the end, side lanes before or after the first as the schedule has it.
void run_lanes(const std::vector<Lane*>& lanes);

}  // namespace standin
