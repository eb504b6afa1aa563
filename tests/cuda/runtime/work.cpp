// Streams and events, and when the work that is queued on them runs.
#include "work.hpp"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

namespace standin {
namespace {

enum class When { kNow, kLate, kEarly, kRandom };
struct Schedule {
  When when = When::kNow;
  std::mt19937 random{0};
};

Schedule parse(const std::string& name) {
  if (name == "late") return {When::kLate, {}};
  if (name == "early") return {When::kEarly, {}};
  if (name.starts_with("random")) {
    const auto colon = name.find(':');
    return {When::kRandom, std::mt19937(colon == name.npos ? 0U : static_cast<unsigned>(std::stoul(name.substr(colon + 1))))};
  }
  return {};
}

Schedule& schedule() {
  static Schedule chosen = [] {
    const char* const name = std::getenv("STANDIN_SCHEDULE");
    return parse(name != nullptr ? name : "now");
  }();
  return chosen;
}

std::vector<std::unique_ptr<Stream>>& streams() {
  static auto& made = *new std::vector<std::unique_ptr<Stream>>;  // never fewer: others may wait for them
  return made;
}

struct Counts {
  long long work = 0, host_waits = 0, events = 0, queries = 0;
} counts;
cudaError_t failure = cudaSuccess;  // that events answer with, as all calls do once a kernel has gone wrong

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// What the schedule makes of work that was queued.
void queued(Stream& stream) {
  Schedule& now = schedule();
  if (now.when == When::kNow || (now.when == When::kEarly && !stream.is_default)) return run_until(stream, stream.issued);
  if (now.when != When::kRandom) return;
  while (now.random() % 3 == 0) {
    Stream& any = *streams()[now.random() % streams().size()];
    run_until(any, std::min<Ticket>(any.issued, any.done + 1 + now.random() % 8));
  }
}

}  // namespace

Ticket Lane::add(Work work) {
  queue.push_back(std::move(work));
  return ++issued;
}

void run_until(Lane& lane, Ticket ticket) {
  std::vector<std::pair<Lane*, Ticket>> goals{{&lane, ticket}};
  while (!goals.empty()) {
    auto& [next, until] = goals.back();
    if (next->done >= until) {
      goals.pop_back();
      continue;
    }
    const Work& first = next->queue.front();
    if (first.after != nullptr && first.after->done < first.ticket) {
      goals.emplace_back(first.after, first.ticket);
      continue;
    }
    Lane& running = *next;
    const Work work = std::move(running.queue.front());
    running.queue.pop_front();
    if (work.run) work.run();
    ++running.done;
  }
}

void run_all() {
  for (std::size_t i = 0; i < streams().size(); ++i) run_until(*streams()[i], streams()[i]->issued);
}

void run_lanes(const std::vector<Lane*>& lanes) {
  const bool side_first = schedule().when == When::kEarly || (schedule().when == When::kRandom && schedule().random() % 2 == 0);
  const auto side = [&] {
    for (std::size_t i = 1; i < lanes.size(); ++i) run_until(*lanes[i], lanes[i]->issued);
  };
  if (side_first) side();
  run_until(*lanes[0], lanes[0]->issued);
  side();
}

Stream& stream_of(cudaStream_t handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) return *reinterpret_cast<Stream*>(handle);
  static auto& defaults = *new std::vector<Stream*>(kMaxDevices, nullptr);
  Stream*& stream = defaults[static_cast<std::size_t>(current_device())];
  if (stream == nullptr) {
    stream = streams().emplace_back(std::make_unique<Stream>()).get();
    stream->device = current_device();
    stream->is_default = true;
  }
  return *stream;
}

const std::vector<std::unique_ptr<Stream>>& all_streams() { return streams(); }

std::map<unsigned long long, std::shared_ptr<Capture>>& captures() {
  static auto& under_way = *new std::map<unsigned long long, std::shared_ptr<Capture>>;
  return under_way;
}

cudaError_t enqueue(cudaStream_t handle, std::function<void()> work, const char* name) {
  Stream& stream = stream_of(handle);
  trace(2, "%s on stream %p", name, static_cast<void*>(&stream));
  ++counts.work;
  if (stream.capture) {
    if (!stream.capture->valid) return cudaErrorStreamCaptureInvalidated;
    stream.capture->lanes[&stream].add({std::move(work)});
    return cudaSuccess;
  }
  stream.add({std::move(work)});
  queued(stream);
  return cudaSuccess;
}

// A thread may make no call that could wait for the device while it captures itself, in any mode but the relaxed one, nor
// while another thread captures in the global mode; a thread that is in the relaxed mode itself may.
bool refused_by_capture(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (const auto& [id, capture] : captures()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool global = capture->mode == cudaStreamCaptureModeGlobal;
    if (capture->mode == cudaStreamCaptureModeRelaxed || (!own && !(global && thread_mode == cudaStreamCaptureModeGlobal)))
      continue;
    trace(1, "%s is not permitted during capture %llu, which ends", call, id);
    capture->valid = false;
    return true;
  }
  return false;
}

}  // namespace standin

using namespace standin;

// For tests, through ctypes.

STANDIN_API void standin_schedule(const char* name) {
  const Lock lock(mutex());
  run_all();
  schedule() = parse(name);
}
STANDIN_API long long standin_num_work() { return counts.work; }
STANDIN_API long long standin_num_host_waits() { return counts.host_waits; }
STANDIN_API long long standin_num_events() { return counts.events; }  // made so far
STANDIN_API long long standin_num_queries() { return counts.queries; }
STANDIN_API void standin_fail_events(int error) {
  const Lock lock(mutex());
  failure = static_cast<cudaError_t>(error);
}

// Streams

STANDIN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned, int priority) {
  const Lock lock(mutex());
  Stream* const stream = streams().emplace_back(std::make_unique<Stream>()).get();
  stream->device = current_device();
  stream->priority = priority;
  return *to = reinterpret_cast<cudaStream_t>(stream), cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned flags) {
  return cudaStreamCreateWithPriority(to, flags, 0);
}
STANDIN_API cudaError_t cudaStreamCreate(cudaStream_t* to) { return cudaStreamCreateWithPriority(to, 0, 0); }
STANDIN_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock(mutex());
  run_until(stream_of(handle), stream_of(handle).issued);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return *priority = stream_of(handle).priority, cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock(mutex());
  ++counts.host_waits;
  Stream& stream = stream_of(handle);
  if (stream.capture) {
    stream.capture->valid = false;
    RETURN(cudaErrorStreamCaptureUnsupported);
  }
  REFUSED_IN_CAPTURE();
  run_until(stream, stream.issued);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  const Stream& stream = stream_of(handle);
  RETURN(stream.done < stream.issued ? cudaErrorNotReady : cudaSuccess);
}
STANDIN_API cudaError_t cudaDeviceSynchronize() {
  const Lock lock(mutex());
  ++counts.host_waits;
  REFUSED_IN_CAPTURE();
  run_all();
  return cudaSuccess;
}

// Events

STANDIN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) {
  auto* const event = new Event;
  ++counts.events;
  event->device = current_device();
  return *to = reinterpret_cast<cudaEvent_t>(event), cudaSuccess;
}
STANDIN_API cudaError_t cudaEventCreate(cudaEvent_t* to) { return cudaEventCreateWithFlags(to, 0); }
STANDIN_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Lock lock(mutex());
  return delete reinterpret_cast<Event*>(handle), cudaSuccess;
}
STANDIN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  const Lock lock(mutex());
  auto& event = *reinterpret_cast<Event*>(handle);
  Stream& stream = stream_of(on);
  if (failure != cudaSuccess) RETURN(failure);
  if (stream.device != event.device) RETURN(cudaErrorInvalidResourceHandle);
  if (stream.capture && !stream.capture->valid) RETURN(cudaErrorStreamCaptureInvalidated);
  event.capture = stream.capture;
  event.lane = stream.capture ? &stream.capture->lanes[&stream] : &stream;
  event.ticket = event.lane->issued;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
STANDIN_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Lock lock(mutex());
  ++counts.queries;
  if (failure != cudaSuccess) RETURN(failure);
  REFUSED_IN_CAPTURE();
  const auto& event = *reinterpret_cast<Event*>(handle);
  if (event.capture) {
    event.capture->valid = false;
    RETURN(cudaErrorCapturedEvent);
  }
  RETURN(event.lane != nullptr && event.lane->done < event.ticket ? cudaErrorNotReady : cudaSuccess);
}
STANDIN_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Lock lock(mutex());
  ++counts.host_waits;
  REFUSED_IN_CAPTURE();
  const auto& event = *reinterpret_cast<Event*>(handle);
  if (event.capture) RETURN(cudaErrorCapturedEvent);
  if (event.lane != nullptr) run_until(*event.lane, event.ticket);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned) {
  const Lock lock(mutex());
  Stream& stream = stream_of(handle);
  const auto& event = *reinterpret_cast<Event*>(waited);
  if (!event.capture) {
    if (stream.capture) {  // work outside of a capture is not for the graph to wait for
      stream.capture->valid = false;
      RETURN(cudaErrorStreamCaptureIsolation);
    }
    if (event.lane != nullptr && event.lane != &stream) stream.add({nullptr, event.lane, event.ticket});
    queued(stream);
    return cudaSuccess;
  }
  if (stream.capture && stream.capture != event.capture) RETURN(cudaErrorStreamCaptureMerge);
  if (!captures().contains(event.capture->id)) return cudaSuccess;  // of a capture that is over
  stream.capture = event.capture;                                   // the stream joins the capture by the wait
  Lane& lane = stream.capture->lanes[&stream];
  if (event.lane != &lane) lane.add({nullptr, event.lane, event.ticket});
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  const Lock lock(mutex());
  RETURN(enqueue(stream, [=] { call(data); }, __func__));
}
STANDIN_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  const Lock lock(mutex());
  RETURN(enqueue(stream, [=] { call(stream, cudaSuccess, data); }, __func__));
}
STANDIN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
