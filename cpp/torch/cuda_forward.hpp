// A CUDA allocator that passes every call on to another one. A virtual function that is missing here would silently fall back to
// the base class: python/olla/pytorch/extension.py compares the list with torch's headers before it compiles.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define OLLA_TORCH_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

namespace olla::replay {

namespace native = c10::cuda::CUDACachingAllocator;

class ForwardingAllocator : public native::CUDAAllocator {
 public:
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;

  explicit ForwardingAllocator(native::CUDAAllocator& inner) : inner_(inner) {}

  // c10::Allocator
  c10::DataPtr allocate(size_t n) override { return inner_.allocate(n); }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return inner_.is_simple_data_ptr(block); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override { inner_.copy_data(to, from, n); }

  // c10::DeviceAllocator
  bool initialized() override { return inner_.initialized(); }
  void emptyCache(Pool pool) override { inner_.emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override { return inner_.getDeviceStats(device); }
  void resetAccumulatedStats(Device device) override { inner_.resetAccumulatedStats(device); }
  void resetPeakStats(Device device) override { inner_.resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(Device device) override { return inner_.getMemoryInfo(device); }

  // CUDAAllocator
  void* raw_alloc(size_t n) override { return inner_.raw_alloc(n); }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override { return inner_.raw_alloc_with_stream(n, stream); }
  void raw_delete(void* block) override { inner_.raw_delete(block); }
  void init(int num_devices) override { inner_.init(num_devices); }
  double getMemoryFraction(Device device) override { return inner_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Device device) override { inner_.setMemoryFraction(fraction, device); }
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(Device device) override {
    return inner_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { inner_.enable(value); }
  bool isEnabled() const override { return inner_.isEnabled(); }
  void cacheInfo(Device device, size_t* largest) override { inner_.cacheInfo(device, largest); }
  void* getBaseAllocation(void* block, size_t* size) override { return inner_.getBaseAllocation(block, size); }
  using native::CUDAAllocator::recordStream;  // the other overload calls this one
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override { inner_.recordStream(block, stream); }
  native::SnapshotInfo snapshot(Pool pool, bool include_traces) override { return inner_.snapshot(pool, include_traces); }
  void beginAllocateToPool(Device device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    inner_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override { inner_.endAllocateToPool(device, pool); }
  void releasePool(Device device, Pool pool) override { inner_.releasePool(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override { return inner_.getPoolUseCount(device, pool); }
  void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<native::CUDAAllocator> allocator) override {
    inner_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Device device, Pool pool, bool use) override { inner_.setUseOnOOM(device, pool, use); }
  void setNoSplit(Device device, Pool pool) override { inner_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool, const std::unordered_set<void*>& expected) override {
    return inner_.checkPoolLiveAllocations(device, pool, expected);
  }
  native::ShareableHandle shareIpcHandle(void* block) override { return inner_.shareIpcHandle(block); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return inner_.getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return inner_.isHistoryEnabled(); }
  void recordHistory(bool enabled, native::CreateContextFn recorder, size_t max_entries, native::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    inner_.recordHistory(enabled, std::move(recorder), max_entries, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    inner_.recordAnnotation(values);
  }
  void pushCompileContext(std::string& context) override { inner_.pushCompileContext(context); }
  void popCompileContext() override { inner_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { inner_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return inner_.getUserMetadata(); }
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    inner_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override {
    inner_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(Device device, Device peer) override { inner_.enablePeerAccess(device, peer); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream,
                          bool peer) override {
    return inner_.memcpyAsync(to, to_device, from, from_device, n, stream, peer);
  }
  std::shared_ptr<native::AllocatorState> getCheckpointState(Device device, Pool pool) override {
    return inner_.getCheckpointState(device, pool);
  }
  native::CheckpointDelta setCheckpointPoolState(Device device, std::shared_ptr<native::AllocatorState> state) override {
    return inner_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return inner_.name(); }

#if OLLA_TORCH_SINCE(12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return inner_.getContextForPointer(block);
  }
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override {
    inner_.attachOomRejectionObserver(std::move(observer));
  }
#endif
#if OLLA_TORCH_SINCE(13)
  void markCaptureBegin(Device device) override { inner_.markCaptureBegin(device); }
  void markCaptureEnd(Device device) override { inner_.markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(size_t n, void* address) override { return inner_.allocateWithAddress(n, address); }
#endif
#if OLLA_TORCH_SINCE(14)
  bool supportsUserMetadata() override { return inner_.supportsUserMetadata(); }
  void annotateMemory(const void* block, const std::string& metadata) override { inner_.annotateMemory(block, metadata); }
#endif

 protected:
  native::CUDAAllocator& inner_;
};

}  // namespace olla::replay
