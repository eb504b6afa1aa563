// Calls every function of the forwarding allocator once, and names those that do not reach the inner allocator as they were called.
#include <sstream>
#include <string>

#include "cuda_forward.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using namespace olla::replay;
using Device = c10::DeviceIndex;
using Pool = c10::MempoolId_t;

template <class T>
std::string shown(const T& value) {
  std::ostringstream text;
  if constexpr (std::is_same_v<T, Pool>)
    text << value.first << '.' << value.second;
  else if constexpr (std::is_same_v<T, Device>)
    text << static_cast<int>(value);
  else if constexpr (requires { value.data_ptr; } || std::is_same_v<T, c10::DataPtr>)
    text << value.get();
  else if constexpr (requires { text << value; })
    text << value;
  else if constexpr (requires { value.size(); })
    text << value.size() << " entries";
  else
    text << (value ? "given" : "none");
  return text.str();
}

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::string text;
  ((text += shown(parts) + ' '), ...);
  return text;
}

void deleter(void*) {}

// Answers with what no default would be, and keeps what it was asked.
struct Inner : native::CUDAAllocator {
  mutable std::string call;
  std::shared_ptr<native::AllocatorState> state = std::make_shared<native::AllocatorState>();
  template <class... Arguments>
  void note(const Arguments&... arguments) const {
    call = joined(arguments...);
  }
#define NOTE(...) note(__func__ __VA_OPT__(, ) __VA_ARGS__)

  c10::DataPtr allocate(size_t n) override { return NOTE(n), c10::DataPtr(this, c10::Device(c10::kCUDA, 0)); }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return NOTE(block), true; }
  c10::DeleterFnPtr raw_deleter() const override { return NOTE(), &deleter; }
  void copy_data(void* to, const void* from, size_t n) const override { NOTE(to, from, n); }
  bool initialized() override { return NOTE(), true; }
  void emptyCache(Pool pool) override { NOTE(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
    return NOTE(device), c10::CachingDeviceAllocator::DeviceStats{.num_ooms = 7};
  }
  void resetAccumulatedStats(Device device) override { NOTE(device); }
  void resetPeakStats(Device device) override { NOTE(device); }
  std::pair<size_t, size_t> getMemoryInfo(Device device) override { return NOTE(device), std::pair<size_t, size_t>(7, 9); }
  void* raw_alloc(size_t n) override { return NOTE(n), this; }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override { return NOTE(n, stream), this; }
  void raw_delete(void* block) override { NOTE(block); }
  void init(int num_devices) override { NOTE(num_devices); }
  double getMemoryFraction(Device device) override { return NOTE(device), 0.5; }
  void setMemoryFraction(double fraction, Device device) override { NOTE(fraction, device); }
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(Device device) override {
    return NOTE(device), std::vector<native::StreamSegmentSize>{{nullptr, true, 7}};
  }
  void enable(bool value) override { NOTE(value); }
  bool isEnabled() const override { return NOTE(), true; }
  void cacheInfo(Device device, size_t* largest) override { NOTE(device, largest); }
  void* getBaseAllocation(void* block, size_t* size) override { return NOTE(block, size), this; }
  using native::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override { NOTE(block, stream.id()); }
  native::SnapshotInfo snapshot(Pool pool, bool traces) override {
    return NOTE(pool, traces), native::SnapshotInfo{.device_traces = {{}, {}}};
  }
  void beginAllocateToPool(Device device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    NOTE(device, pool, filter);
  }
  void endAllocateToPool(Device device, Pool pool) override { NOTE(device, pool); }
  void releasePool(Device device, Pool pool) override { NOTE(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override { return NOTE(device, pool), 7; }
  void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<native::CUDAAllocator> allocator) override {
    NOTE(device, pool, allocator);
  }
  void setUseOnOOM(Device device, Pool pool, bool use) override { NOTE(device, pool, use); }
  void setNoSplit(Device device, Pool pool) override { NOTE(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool, const std::unordered_set<void*>& expected) override {
    return NOTE(device, pool, expected), true;
  }
  native::ShareableHandle shareIpcHandle(void* block) override { return NOTE(block), native::ShareableHandle{7, "handle"}; }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return NOTE(handle), state; }
  bool isHistoryEnabled() override { return NOTE(), true; }
  void recordHistory(bool enabled, native::CreateContextFn recorder, size_t entries, native::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    NOTE(enabled, recorder != nullptr, entries, static_cast<int>(when), clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override { NOTE(values); }
  void pushCompileContext(std::string& context) override { NOTE(context); }
  void popCompileContext() override { NOTE(); }
  void setUserMetadata(const std::string& metadata) override { NOTE(metadata); }
  std::string getUserMetadata() override { return NOTE(), "metadata"; }
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override { NOTE(observer); }
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override { NOTE(tracker); }
  void enablePeerAccess(Device device, Device peer) override { NOTE(device, peer); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t stream,
                          bool peer) override {
    return NOTE(to, to_device, from, from_device, n, stream, peer), cudaErrorNotReady;
  }
  std::shared_ptr<native::AllocatorState> getCheckpointState(Device device, Pool pool) override {
    return NOTE(device, pool), state;
  }
  native::CheckpointDelta setCheckpointPoolState(Device device, std::shared_ptr<native::AllocatorState> given) override {
    NOTE(device, given);
    native::CheckpointDelta delta;
    delta.ptrs_freed = {this};
    return delta;
  }
  std::string name() override { return NOTE(), "inner"; }
#if OLLA_TORCH_SINCE(12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) override {
    return NOTE(block), std::make_shared<c10::GatheredContext>();
  }
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override { NOTE(observer); }
#endif
#if OLLA_TORCH_SINCE(13)
  void markCaptureBegin(Device device) override { NOTE(device); }
  void markCaptureEnd(Device device) override { NOTE(device); }
  c10::DataPtr allocateWithAddress(size_t n, void* address) override {
    return NOTE(n, address), c10::DataPtr(this, c10::Device(c10::kCUDA, 0));
  }
#endif
};

std::string failures;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  failures += what + '\n';
}

}  // namespace

// A line for each function that does not hold; empty: all do.
EXPORTED const char* not_forwarded() {
  failures.clear();
  Inner inner;
  ForwardingAllocator outer(inner);
  void* const block = &failures;
  void* const other = &inner;
  size_t size = 0;
  const auto stream = reinterpret_cast<cudaStream_t>(&size);
  const c10::Stream raw(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 1), 12);
  const c10::cuda::CUDAStream side(c10::cuda::CUDAStream::UNCHECKED, raw);
  const c10::DataPtr data(block, c10::Device(c10::kCUDA, 1));
  const Pool pool{3, 4};
  std::string text = "text";
// What arrived: the function's own name and arguments.
#define ARRIVES(name, ...) expect(inner.call == joined(#name __VA_OPT__(, ) __VA_ARGS__), #name " arrived as " + inner.call)
#define FORWARDS(name, ...) \
  outer.name(__VA_ARGS__);  \
  ARRIVES(name __VA_OPT__(, ) __VA_ARGS__)
#define ANSWERS(name, answered, ...)                                           \
  {                                                                            \
    const auto& result = outer.name(__VA_ARGS__);                              \
    expect((answered), #name " gave another answer than the inner allocator"); \
    ARRIVES(name __VA_OPT__(, ) __VA_ARGS__);                                  \
  }
  ANSWERS(allocate, result.get() == &inner, size_t{5})
  ANSWERS(is_simple_data_ptr, result, data)
  ANSWERS(raw_deleter, result == &deleter)
  FORWARDS(copy_data, block, other, size_t{5});
  ANSWERS(initialized, result)
  FORWARDS(emptyCache, pool);
  ANSWERS(getDeviceStats, result.num_ooms == 7, Device{1})
  FORWARDS(resetAccumulatedStats, Device{1});
  FORWARDS(resetPeakStats, Device{1});
  ANSWERS(getMemoryInfo, result == std::pair(size_t{7}, size_t{9}), Device{1})
  ANSWERS(raw_alloc, result == &inner, size_t{5})
  ANSWERS(raw_alloc_with_stream, result == &inner, size_t{5}, stream)
  FORWARDS(raw_delete, block);
  FORWARDS(init, 2);
  ANSWERS(getMemoryFraction, result == 0.5, Device{1})
  FORWARDS(setMemoryFraction, 0.25, Device{1});
  ANSWERS(getExpandableSegmentSizes, result.size() == 1, Device{1})
  FORWARDS(enable, true);
  ANSWERS(isEnabled, result)
  FORWARDS(cacheInfo, Device{1}, &size);
  ANSWERS(getBaseAllocation, result == &inner, block, &size)
  outer.recordStream(data, side);
  ARRIVES(recordStream, data, side.id());
  outer.recordStream(data, raw);
  ARRIVES(recordStream, data, side.id());
  ANSWERS(snapshot, result.device_traces.size() == 2, pool, true)
  FORWARDS(beginAllocateToPool, Device{1}, pool, std::function<bool(cudaStream_t)>([](cudaStream_t) { return true; }));
  FORWARDS(endAllocateToPool, Device{1}, pool);
  FORWARDS(releasePool, Device{1}, pool);
  ANSWERS(getPoolUseCount, result == 7, Device{1}, pool)
  FORWARDS(createOrIncrefPool, Device{1}, pool, std::shared_ptr<native::CUDAAllocator>());
  FORWARDS(setUseOnOOM, Device{1}, pool, true);
  FORWARDS(setNoSplit, Device{1}, pool);
  ANSWERS(checkPoolLiveAllocations, result, Device{1}, pool, std::unordered_set<void*>{block})
  ANSWERS(shareIpcHandle, result.offset == 7 && result.handle == "handle", block)
  ANSWERS(getIpcDevPtr, result == inner.state, text)
  ANSWERS(isHistoryEnabled, result)
  outer.recordHistory(true, nullptr, 5, native::RecordContext::ALL, true, {"skipped"});
  ARRIVES(recordHistory, true, false, 5, static_cast<int>(native::RecordContext::ALL), true, std::vector<int>(1));
  FORWARDS(recordAnnotation, std::vector<std::pair<std::string, std::string>>(3));
  FORWARDS(pushCompileContext, text);
  FORWARDS(popCompileContext);
  FORWARDS(setUserMetadata, text);
  ANSWERS(getUserMetadata, result == "metadata")
  FORWARDS(attachOutOfMemoryObserver, native::OutOfMemoryObserver([](auto...) {}));
  FORWARDS(attachAllocatorTraceTracker, native::AllocatorTraceTracker([](const auto&) {}));
  FORWARDS(enablePeerAccess, Device{1}, Device{2});
  ANSWERS(memcpyAsync, result == cudaErrorNotReady, block, 1, other, 2, size_t{5}, stream, true)
  ANSWERS(getCheckpointState, result == inner.state, Device{1}, pool)
  ANSWERS(setCheckpointPoolState, result.ptrs_freed.size() == 1, Device{1}, inner.state)
  ANSWERS(name, result == "inner")
#if OLLA_TORCH_SINCE(12)
  ANSWERS(getContextForPointer, result != nullptr, block)
  FORWARDS(attachOomRejectionObserver, native::OomRejectionObserver([](auto...) {}));
#endif
#if OLLA_TORCH_SINCE(13)
  FORWARDS(markCaptureBegin, Device{1});
  FORWARDS(markCaptureEnd, Device{1});
  ANSWERS(allocateWithAddress, result.get() == &inner, size_t{5}, block)
#endif
  return failures.c_str();
}

// Calls of torch's C++ code that Python has no words for, to the allocator that is in front.
EXPORTED void* base_of(void* block, size_t* size) { return native::get()->getBaseAllocation(block, size); }
EXPORTED std::ptrdiff_t shared_at(void* block) { return native::get()->shareIpcHandle(block).offset; }
EXPORTED void* raw_allocate(size_t n) { return c10::GetAllocator(c10::kCUDA)->raw_allocate(n); }
EXPORTED void raw_deallocate(void* block) { c10::GetAllocator(c10::kCUDA)->raw_deallocate(block); }
