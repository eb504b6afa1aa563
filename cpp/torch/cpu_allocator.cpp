// The planning allocator of the CPU device: it wraps c10's and sees every request for a tensor or a workspace.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "allocator.hpp"

namespace olla::replay {
namespace {

std::atomic<c10::Allocator*> inner{nullptr};  // answers whatever is not planned
std::atomic<c10::DeleterFnPtr> inner_deleter{nullptr};
thread_local bool probing = false;

// The deleter of all blocks handed out inside windows. It gets the address alone, which tells arena blocks from others.
void free_block(void* block) {
  if (!memory().freed(block)) inner_deleter.load(std::memory_order_relaxed)(block);
}

class PlanningAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    c10::Allocator* const present = inner.load(std::memory_order_relaxed);
    if (!Memory::inside() || num_bytes == 0 || probing) {
      probing = false;
      return present->allocate(num_bytes);
    }
    const auto bytes = static_cast<Bytes>(num_bytes);
    if (void* block = memory().planned(bytes)) return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
    c10::DataPtr block = present->allocate(num_bytes);
    if (Memory::recording()) {
      const bool seen = block.get() == block.get_context() && block.compare_exchange_deleter(inner_deleter, &free_block);
      memory().record(seen ? block.get() : nullptr, bytes);
    }
    return block;
  }

  // raw_deallocate may get a block of either kind, inside or outside a window.
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return inner.load()->is_simple_data_ptr(block); }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { inner.load()->copy_data(to, from, num_bytes); }
};

// Returns freed heap memory to the system: glibc would keep it resident beside the arena.
void give_back_freed(Bytes) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Whether torch's requests reach this allocator: another one may have been registered in front of it.
bool reached() {
  probing = true;
  c10::GetAllocator(c10::DeviceType::CPU)->allocate(1);
  return !std::exchange(probing, false);
}

}  // namespace

Memory& memory() {
  static Memory& memory = *new Memory({
      // never destroyed: tensors may be freed after all static objects
      .alignment = static_cast<Bytes>(c10::gAlignment),
      .take = [](Bytes bytes) { return inner.load()->raw_allocate(static_cast<std::size_t>(bytes)); },
      .give = [](void* arena) { inner_deleter.load()(arena); },
      .make_room = give_back_freed,
  });
  return memory;
}

void install() {
  static std::mutex mutex;
  static PlanningAllocator& planning = *new PlanningAllocator;
  const std::lock_guard lock(mutex);
  if (inner != nullptr && reached()) return;
  c10::Allocator* const present = c10::GetAllocator(c10::DeviceType::CPU);
  // The other allocator may call ours: with ours in front of it as well, the two could call each other forever.
  if (inner != nullptr && present != inner) throw std::runtime_error("another CPU allocator was registered after olla's");
  if (present->raw_deleter() == nullptr) throw std::runtime_error("the present CPU allocator has no raw_deleter");
  inner_deleter = present->raw_deleter();
  inner = present;
  // SetAllocator silently ignores a priority below the present allocator's.
  for (int priority = 0; priority <= 255; ++priority) {
    c10::SetAllocator(c10::DeviceType::CPU, &planning, static_cast<std::uint8_t>(priority));
    if (c10::GetAllocator(c10::DeviceType::CPU) == &planning) return;
  }
  throw std::runtime_error("torch does not let another CPU allocator be registered");
}

}  // namespace olla::replay
