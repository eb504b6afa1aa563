// The planning allocator of CUDA devices: it wraps the present one, which supplies the arenas and all unplanned memory. Built
// against torch 2.11 to 2.15; not measured on a device.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

#include "allocator.hpp"
#include "cuda_forward.hpp"
#include "cuda_quarantine.hpp"

namespace olla::replay {
namespace {

constexpr Bytes kCudaAlignment = 512;

std::atomic<native::CUDAAllocator*> inner{nullptr};

// A slot may be reused at once only by work queued behind its last use, so on the same stream and device. A CUDA graph writes to
// the memory of its capture at every later replay: each capture counts as a place of its own.
std::int64_t place_of(c10::cuda::CUDAStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess) cudaGetLastError();  // another thread captures
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  return (static_cast<std::int64_t>(stream.id()) * 256 + stream.device_index()) ^
         static_cast<std::int64_t>(capture * 0x9E3779B97F4A7C15ULL);
}

Quarantine& quarantine() {
  static Quarantine& quarantine = *new Quarantine([](void* block) { memory().freed(block); });
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

// Bytes of the segment that torch's allocator reserves for a block that fits into no cached one.
std::size_t segment_bytes(std::size_t bytes) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  if (bytes <= kMiB) return 2 * kMiB;
  return bytes < 10 * kMiB ? 20 * kMiB : (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
}

std::size_t largest_free() {
  std::size_t largest = 1;  // 0 would ask for what the device has left
  inner.load()->cacheInfo(c10::cuda::current_device(), &largest);
  return largest;
}

// Releases torch's cached blocks unless the arena fits into one of them: they would stay reserved beside the arena.
void make_room(Bytes bytes) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status) != cudaSuccess) cudaGetLastError();
  if (status != cudaStreamCaptureStatusNone) return;
  if (largest_free() < static_cast<std::size_t>(bytes)) inner.load()->emptyCache({0, 0});
}

// Throws if the arena would raise torch's reserved memory above its peak so far, that of the loop without a plan.
void require_no_more(Bytes bytes) {
  const auto needed = static_cast<std::size_t>(bytes);
  if (largest_free() >= needed) return;
  const auto reserved = inner.load()->getDeviceStats(c10::cuda::current_device()).reserved_bytes[0];  // of all pools
  const auto with_arena = static_cast<std::size_t>(reserved.current) + segment_bytes(needed);
  if (with_arena > static_cast<std::size_t>(reserved.peak))
    throw std::runtime_error("torch's allocator would reserve " + std::to_string(with_arena) + " bytes with it, and has reserved " +
                             std::to_string(reserved.peak) + " at most without");
}

class PlanningAllocator final : public ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;

  c10::DataPtr allocate(size_t num_bytes) override {
    const auto bytes = static_cast<Bytes>(num_bytes);
    if (!Memory::inside() || num_bytes == 0 || memory().elsewhere()) {
      Memory::count_given(bytes);
      return inner_.allocate(num_bytes);
    }
    quarantine().poll();
    if (void* const block = memory().at_place() ? memory().planned(bytes) : memory().refuse(bytes, "stream"))
      return {block, block, &free_block, c10::Device(c10::DeviceType::CUDA, c10::cuda::current_device())};
    Memory::count_given(bytes);
    c10::DataPtr block = inner_.allocate(num_bytes);
    if (Memory::recording()) {
      const bool seen = block.get() == block.get_context() && block.compare_exchange_deleter(inner_.raw_deleter(), &free_block);
      memory().record(seen ? block.get() : nullptr, bytes);
    }
    return block;
  }

  void* raw_alloc(size_t num_bytes) override {
    Memory::count_given(static_cast<Bytes>(num_bytes));
    return inner_.raw_alloc(num_bytes);
  }
  void* raw_alloc_with_stream(size_t num_bytes, cudaStream_t stream) override {
    Memory::count_given(static_cast<Bytes>(num_bytes));
    return inner_.raw_alloc_with_stream(num_bytes, stream);
  }

  // The native deleter outside windows: other code compares it with the deleters of native blocks.
  c10::DeleterFnPtr raw_deleter() const override { return Memory::inside() ? &free_block : inner_.raw_deleter(); }

  using ForwardingAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get_deleter() != &free_block) return inner_.recordStream(block, stream);
    if (const auto [arena, place] = memory().arena_of(block.get()); arena != nullptr) {
      if (place_of(stream) != place) quarantine().use(block.get(), stream);
      return;
    }
    // A native block that got our deleter while recording: the native allocator accepts it only under its own deleter.
    c10::DataPtr alias(block.get(), block.get(), inner_.raw_deleter(), block.device());
    inner_.recordStream(alias, stream);
    alias.release_context();
  }

  // The native allocator knows an arena by its first address only.
  void* getBaseAllocation(void* block, size_t* size) override {
    void* const base = memory().arena_of(block).first;
    return inner_.getBaseAllocation(base != nullptr ? base : block, size);
  }
  native::ShareableHandle shareIpcHandle(void* block) override {
    void* const base = memory().arena_of(block).first;
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
      [] { return place_of(c10::cuda::getCurrentCUDAStream()); },
      [] { return static_cast<std::size_t>(c10::cuda::current_device()); },
      [] { quarantine().poll(); },
      make_room,
      require_no_more,
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
  // SetAllocator silently ignores a priority below the present allocator's.
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
