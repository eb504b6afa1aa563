// The planning allocator of CUDA devices: in front of the present one, which it asks for the arena and for all that is not planned.
// Built against torch 2.11 to 2.15; not measured on a device.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"
#include "cuda_forward.hpp"

namespace olla::replay {
namespace {

constexpr Bytes kCudaAlignment = 512;

std::atomic<native::CUDAAllocator*> inner{nullptr};

// A slot may be used again at once only by work queued behind its last use: on the same stream of the same device. What a capture
// writes to, its graph writes to at any later time: that is an arena of its own, or none.
std::int64_t current_place() {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess) cudaGetLastError();  // another thread captures
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  return (static_cast<std::int64_t>(stream.id()) * 256 + stream.device_index()) ^
         static_cast<std::int64_t>(capture * 0x9E3779B97F4A7C15ULL);
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Blocks of an arena that other streams use: their slots stay taken until those streams have passed the point of the free.
class Quarantine {
 public:
  void use(void* block, c10::cuda::CUDAStream stream) {
    const std::lock_guard lock(mutex_);
    streams_[block].push_back(stream);
    any_ = true;
  }

  // False when no other stream used the block: its slot is free at once.
  bool hold(void* block) {
    if (!any_) return false;
    const std::lock_guard lock(mutex_);
    auto streams = streams_.extract(block);
    if (streams.empty()) return false;
    held_.push_back({block, std::move(streams.mapped()), {}});
    advance(held_.back());
    return true;
  }

  // Frees the slots whose streams are done.
  void poll() {
    if (!any_) return;
    std::vector<void*> done;
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(held_, [&](Held& held) {
        if (!advance(held)) return false;
        done.push_back(held.block);
        return true;
      });
      any_ = !streams_.empty() || !held_.empty();
    }
    for (void* block : done) memory().freed(block);
  }

 private:
  struct Held {
    void* block;
    std::vector<c10::cuda::CUDAStream> streams;  // without an event so far
    std::vector<cudaEvent_t> events;             // that have not passed
  };

  // Whether all streams have passed. While one is captured into a graph no event can be waited for: later.
  static bool advance(Held& held) {
    std::erase_if(held.streams, [&](c10::cuda::CUDAStream stream) {
      if (capturing(stream)) return false;
      cudaEvent_t event = nullptr;
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      C10_CUDA_CHECK(cudaEventRecord(event, stream));
      held.events.push_back(event);
      return true;
    });
    if (capturing(c10::cuda::getCurrentCUDAStream())) return false;
    std::erase_if(held.events, [](cudaEvent_t event) {
      const cudaError_t status = cudaEventQuery(event);
      if (status == cudaErrorNotReady) return static_cast<void>(cudaGetLastError()), false;
      C10_CUDA_CHECK(status);
      C10_CUDA_CHECK(cudaEventDestroy(event));
      return true;
    });
    return held.streams.empty() && held.events.empty();
  }

  std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::unordered_map<void*, std::vector<c10::cuda::CUDAStream>> streams_;
  std::vector<Held> held_;
};

Quarantine& quarantine() {
  static Quarantine& quarantine = *new Quarantine;
  return quarantine;
}

// The deleter of all blocks handed out inside windows.
void free_block(void* block) {
  if (!quarantine().hold(block) && !memory().freed(block)) inner.load()->raw_delete(block);
}

void* take_arena(Bytes bytes) {
  try {
    return inner.load()->raw_alloc(static_cast<size_t>(bytes));
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(error.what_without_backtrace());
  }
}

class PlanningAllocator final : public ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;

  c10::DataPtr allocate(size_t num_bytes) override {
    if (!Memory::inside() || num_bytes == 0) return inner_.allocate(num_bytes);
    const auto bytes = static_cast<Bytes>(num_bytes);
    quarantine().poll();
    if (void* const block = memory().at_place() ? memory().planned(bytes) : memory().refuse(bytes, "stream"))
      return {block, block, &free_block, c10::Device(c10::DeviceType::CUDA, c10::cuda::current_device())};
    c10::DataPtr block = inner_.allocate(num_bytes);
    if (Memory::recording()) {
      const bool seen = block.get() == block.get_context() && block.compare_exchange_deleter(inner_.raw_deleter(), &free_block);
      memory().record(seen ? block.get() : nullptr, bytes);
    }
    return block;
  }

  // The native one outside windows: others compare it with the deleters of native blocks.
  c10::DeleterFnPtr raw_deleter() const override { return Memory::inside() ? &free_block : inner_.raw_deleter(); }

  using ForwardingAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get_deleter() != &free_block) return inner_.recordStream(block, stream);
    if (memory().arena_base(block.get()) != nullptr) return quarantine().use(block.get(), stream);
    // A native block under our deleter, made while recording: the native allocator knows it by its own deleter only.
    c10::DataPtr alias(block.get(), block.get(), inner_.raw_deleter(), block.device());
    inner_.recordStream(alias, stream);
    alias.release_context();
  }

  // The native allocator knows an arena by its first address only.
  void* getBaseAllocation(void* block, size_t* size) override {
    void* const base = memory().arena_base(block);
    return inner_.getBaseAllocation(base != nullptr ? base : block, size);
  }
  native::ShareableHandle shareIpcHandle(void* block) override {
    void* const base = memory().arena_base(block);
    if (base == nullptr) return inner_.shareIpcHandle(block);
    native::ShareableHandle handle = inner_.shareIpcHandle(base);
    handle.offset += static_cast<char*>(block) - static_cast<char*>(base);
    return handle;
  }
};

}  // namespace

Memory& memory() {
  static Memory& memory = *new Memory({
      kCudaAlignment,
      take_arena,
      [](void* arena) { inner.load()->raw_delete(arena); },
      current_place,
  });
  return memory;
}

void install() {
  static std::mutex mutex;
  static PlanningAllocator* planning = nullptr;
  const std::lock_guard lock(mutex);
  native::CUDAAllocator* const present = native::get();
  if (present == nullptr || !present->initialized()) throw std::runtime_error("CUDA is not initialized: call torch.cuda.init()");
  quarantine().poll();
  if (planning != nullptr) {
    if (present != planning) throw std::runtime_error("another CUDA allocator was registered after olla's");
    return;
  }
  inner = present;
  auto* const made = new PlanningAllocator(*present);
  // A lower priority than the present allocator's is ignored without a word.
  for (int priority = 0; priority <= 255; ++priority) {
    c10::SetAllocator(c10::DeviceType::CUDA, made, static_cast<std::uint8_t>(priority));
    if (c10::GetAllocator(c10::DeviceType::CUDA) != made) continue;
    planning = made;
    native::allocator.store(made);
    return;
  }
  delete made;
  throw std::runtime_error("torch does not let another CUDA allocator be registered");
}

}  // namespace olla::replay
