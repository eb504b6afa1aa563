// Arena blocks that other streams use: their slots stay taken until those streams have passed the point of the free.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace olla::replay {

// Like torch's own allocator: one event per block and stream, events of a stream queried in order. So a request costs one query
// per stream with pending blocks, however many blocks wait.
class Quarantine {
 public:
  explicit Quarantine(std::function<void(void*)> let_go) : let_go_(std::move(let_go)) {}

  // The block is used on a stream that its arena was not taken for.
  void use(void* block, c10::cuda::CUDAStream stream) {
    const std::lock_guard lock(mutex_);
    std::vector<c10::cuda::CUDAStream>& streams = streams_[block];
    if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
    any_ = true;
  }

  // False when no other stream used the block: its slot is free at once. Called by a deleter, which must not throw: CUDA errors
  // surface in the poll() of the next request.
  bool hold(void* block) noexcept {
    if (!any_) return false;
    const std::lock_guard lock(mutex_);
    const auto used = streams_.extract(block);
    if (used.empty()) return false;
    num_awaited_[block] = used.mapped().size();
    for (const c10::cuda::CUDAStream& stream : used.mapped())
      if (mark(block, stream) != kMarked) unmarked_.emplace_back(block, stream);
    return true;
  }

  // Frees the blocks whose streams have reached their events. Throws pending CUDA errors, as every call of torch then does.
  void poll() {
    if (!any_) return;
    std::vector<void*> done;
    cudaError_t error = cudaSuccess;
    {
      const std::lock_guard lock(mutex_);
      const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(cudaStreamCaptureModeRelaxed);
      std::erase_if(unmarked_, [&](const auto& use) {
        const int marked = mark(use.first, use.second);
        if (marked > kMarked) error = static_cast<cudaError_t>(marked);
        return marked == kMarked;
      });
      for (auto& [stream, marks] : marks_)
        while (!marks.empty() && has_passed(marks.front().event, &error)) {
          spare_[stream.device_index()].push_back(marks.front().event);
          const auto awaited = num_awaited_.find(marks.front().block);
          if (--awaited->second == 0) {
            done.push_back(awaited->first);
            num_awaited_.erase(awaited);
          }
          marks.pop_front();
        }
      any_ = !streams_.empty() || !num_awaited_.empty();
    }
    for (void* block : done) let_go_(block);
    C10_CUDA_CHECK(error);
  }

 private:
  struct Mark {
    cudaEvent_t event;
    void* block;
  };
  static constexpr int kMarked = cudaSuccess, kCaptured = -1;  // other results are errors of CUDA

  // Records an event at the present end of the stream, unless the stream is being captured or the device has failed.
  int mark(void* block, c10::cuda::CUDAStream stream) noexcept {
    const auto failed = [](cudaError_t error) { return cudaGetLastError(), error; };
    try {
      const c10::cuda::CUDAGuard on_its_device(stream.device_index());  // events and default streams are of the current one
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      const cudaError_t unknown = cudaStreamIsCapturing(stream, &status);
      if (unknown == cudaErrorStreamCaptureImplicit) return failed(unknown), kCaptured;  // a default stream beside a capture
      if (unknown != cudaSuccess) return failed(unknown);
      if (status != cudaStreamCaptureStatusNone) return kCaptured;
      std::vector<cudaEvent_t>& spare = spare_[stream.device_index()];
      if (spare.empty()) {
        cudaEvent_t event = nullptr;
        if (const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) return failed(error);
        spare.push_back(event);
      }
      if (const cudaError_t error = cudaEventRecord(spare.back(), stream)) return failed(error);
      marks_[stream].push_back({spare.back(), block});
      spare.pop_back();
      return kMarked;
    } catch (const c10::Error&) {
      return failed(cudaErrorUnknown);
    }
  }

  static bool has_passed(cudaEvent_t event, cudaError_t* error) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) return true;
    cudaGetLastError();
    if (status != cudaErrorNotReady) *error = status;
    return false;
  }

  std::function<void(void*)> let_go_;
  std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::unordered_map<void*, std::vector<c10::cuda::CUDAStream>> streams_;  // of blocks in use
  std::unordered_map<void*, std::size_t> num_awaited_;                     // streams that a freed block waits for
  std::vector<std::pair<void*, c10::cuda::CUDAStream>> unmarked_;          // of these, those without an event so far
  std::unordered_map<c10::cuda::CUDAStream, std::deque<Mark>> marks_;      // the others, in the order of the stream
  std::unordered_map<int, std::vector<cudaEvent_t>> spare_;                // by device
};

}  // namespace olla::replay
