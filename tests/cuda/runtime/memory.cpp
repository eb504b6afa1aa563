// Allocations, of devices and pinned ones of the host; copies and fills, as work on streams.
#include "memory.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "work.hpp"

namespace standin {
namespace {

struct Block {
  std::size_t bytes;
  int device;
};
template <class Value>
const std::pair<const std::uintptr_t, Value>* containing(const std::map<std::uintptr_t, Value>& all, std::uintptr_t address) {
  auto next = all.upper_bound(address);
  return next == all.begin() ? nullptr : &*std::prev(next);
}

std::map<std::uintptr_t, Block>& blocks() {
  static auto& all = *new std::map<std::uintptr_t, Block>;
  return all;
}
std::map<std::uintptr_t, std::size_t>& pinned() {  // host memory, allocated or registered here
  static auto& all = *new std::map<std::uintptr_t, std::size_t>;
  return all;
}

const Block* device_block(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto* found = containing(blocks(), address);
  return found != nullptr && address < found->first + found->second.bytes ? &found->second : nullptr;
}
bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto* found = containing(pinned(), address);
  return found != nullptr && address < found->first + found->second;
}

cudaError_t allocate(void** pointer, std::size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const std::size_t whole = round_up(bytes, kPage);
  const int device = current_device();
  if (!take(device, whole)) return cudaErrorMemoryAllocation;
  *pointer = reserve(whole);
  if (*pointer == nullptr) return give_back(device, whole), cudaErrorMemoryAllocation;
  map(*pointer, whole, device);
  trace(1, "allocate %p, %zu bytes on device %d, %zu used", *pointer, bytes, device, used_bytes(device));
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = blocks().find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == blocks().end()) return cudaErrorInvalidValue;
  const Block block = found->second;
  run_all();  // it waits for the device
  blocks().erase(found);
  give_back(block.device, block.bytes);
  unreserve(pointer, block.bytes);
  trace(1, "free %p, %zu bytes on device %d, %zu used", pointer, block.bytes, block.device, used_bytes(block.device));
  return cudaSuccess;
}

// Memory of the host that is not pinned is read when the copy is queued, and written before the call returns.
cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream, const char* call) {
  const bool host_to = device_block(to) == nullptr, host_from = device_block(from) == nullptr;
  cudaError_t error;
  if (host_from && !is_pinned(from)) {
    auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    error = enqueue(stream, [=] { std::memcpy(to, staged->data(), bytes); }, call);
  } else {
    error = enqueue(stream, [=] { std::memmove(to, from, bytes); }, call);
  }
  Stream& queue = stream_of(stream);
  if (error == cudaSuccess && host_to && !is_pinned(to) && !queue.capture) run_until(queue, queue.issued);
  return error;
}

void fill(void* to, int value, std::size_t bytes) {
  char* const start = static_cast<char*>(to);
  char* const first = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(start), 4096));
  char* const last = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(start + bytes) / 4096 * 4096);
  if (value != 0 || last <= first + (1 << 20)) return static_cast<void>(std::memset(to, value, bytes));
  std::memset(start, 0, static_cast<std::size_t>(first - start));
  madvise(first, static_cast<std::size_t>(last - first), MADV_DONTNEED);  // whole pages are given back, and zero again
  std::memset(last, 0, static_cast<std::size_t>(start + bytes - last));
}

}  // namespace

void* reserve(std::size_t bytes) {
  void* const base = mmap(nullptr, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  char* const from = static_cast<char*>(base);
  char* const start = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(from), kPage));
  if (start > from) munmap(from, static_cast<std::size_t>(start - from));
  munmap(start + bytes, static_cast<std::size_t>(from + kPage - start));
  return start;
}
void unreserve(void* start, std::size_t bytes) { munmap(start, bytes); }

void map(void* start, std::size_t bytes, int device) {
  mprotect(start, bytes, PROT_READ | PROT_WRITE);
  blocks()[reinterpret_cast<std::uintptr_t>(start)] = {bytes, device};
}
void unmap(void* start, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(start);
  mmap(start, bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  blocks().erase(blocks().lower_bound(first), blocks().lower_bound(first + bytes));
}

bool block_at(std::uintptr_t address, std::uintptr_t* start, std::size_t* bytes) {
  const auto* found = containing(blocks(), address);
  if (found == nullptr || address >= found->first + found->second.bytes) return false;
  *start = found->first;
  *bytes = found->second.bytes;
  return true;
}

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaMemGetInfo(std::size_t* left, std::size_t* total) {
  const Lock lock(mutex());
  *total = device_bytes();
  return *left = *total - used_bytes(current_device()), cudaSuccess;
}
STANDIN_API cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  RETURN(allocate(pointer, bytes));
}
STANDIN_API cudaError_t cudaFree(void* pointer) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  RETURN(release(pointer));
}
STANDIN_API cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) {
  const Lock lock(mutex());
  RETURN(allocate(pointer, bytes));
}
STANDIN_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  const Lock lock(mutex());
  RETURN(release(pointer));
}
STANDIN_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  return *pool = reinterpret_cast<cudaMemPool_t>(std::uintptr_t{8}), cudaSuccess;
}
STANDIN_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return *static_cast<std::uint64_t*>(value) = used_bytes(current_device()), cudaSuccess;
}
STANDIN_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
STANDIN_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) { return cudaSuccess; }
STANDIN_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }

STANDIN_API cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  *pointer = std::aligned_alloc(4096, round_up(bytes, 4096));
  if (*pointer == nullptr) RETURN(cudaErrorMemoryAllocation);
  pinned()[reinterpret_cast<std::uintptr_t>(*pointer)] = bytes;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaFreeHost(void* pointer) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  run_all();
  if (pinned().erase(reinterpret_cast<std::uintptr_t>(pointer)) == 0) RETURN(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaHostRegister(void* pointer, std::size_t bytes, unsigned) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  if (static_cast<double>(bytes) > setting("STANDIN_PINNED", 1e15)) RETURN(cudaErrorMemoryAllocation);
  if (is_pinned(pointer)) RETURN(cudaErrorHostMemoryAlreadyRegistered);
  pinned()[reinterpret_cast<std::uintptr_t>(pointer)] = bytes;
  trace(1, "register %p, %zu bytes", pointer, bytes);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock(mutex());  // no wait for the device: nothing says that a driver waits
  if (pinned().erase(reinterpret_cast<std::uintptr_t>(pointer)) == 0) RETURN(cudaErrorHostMemoryNotRegistered);
  trace(1, "unregister %p", pointer);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* pointer) {
  const Lock lock(mutex());
  *to = {};
  if (const Block* block = device_block(pointer)) {
    to->type = cudaMemoryTypeDevice;
    to->device = block->device;
    to->devicePointer = const_cast<void*>(pointer);
  } else if (is_pinned(pointer)) {
    to->type = cudaMemoryTypeHost;
    to->hostPointer = to->devicePointer = const_cast<void*>(pointer);
  } else {
    to->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const Lock lock(mutex());
  RETURN(copy(to, from, bytes, stream, __func__));
}
STANDIN_API cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  const Lock lock(mutex());
  REFUSED_IN_CAPTURE();
  const cudaError_t error = copy(to, from, bytes, nullptr, __func__);
  run_until(stream_of(nullptr), stream_of(nullptr).issued);
  RETURN(error);
}
STANDIN_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  const Lock lock(mutex());
  RETURN(copy(to, from, bytes, stream, __func__));
}
STANDIN_API cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                          std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t stream) {
  const Lock lock(mutex());
  for (std::size_t row = 0; row < height; ++row) {
    const auto* source = static_cast<const char*>(from) + row * from_pitch;
    if (const cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch, source, width, stream, __func__)) RETURN(error);
  }
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const Lock lock(mutex());
  RETURN(enqueue(stream, [=] { fill(to, value, bytes); }, __func__));
}
STANDIN_API cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
STANDIN_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaGetSymbolAddress(void** to, const void*) {
  static void* const memory = std::calloc(1, 1 << 20);
  return *to = memory, cudaSuccess;
}
// A handle names memory of this process; no other process can open it.
STANDIN_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* block) {
  *handle = {};
  std::memcpy(handle->reserved, &block, sizeof block);
  RETURN(cudaSuccess);
}
STANDIN_API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { RETURN(cudaErrorNotSupported); }
STANDIN_API cudaError_t cudaIpcCloseMemHandle(void*) { RETURN(cudaErrorNotSupported); }
STANDIN_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { RETURN(cudaErrorNotSupported); }
STANDIN_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { RETURN(cudaErrorNotSupported); }
