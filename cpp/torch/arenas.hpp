// Arenas hold the planned blocks: taken from the default allocator, given back once no block in them is in use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "slots.hpp"

namespace olla::replay {

// Where arenas come from.
struct Source {
  Bytes alignment;                   // of every block
  std::function<void*(Bytes)> take;  // memory of an arena, from the default allocator
  std::function<void(void*)> give;   // back to it
  // Identifies device and stream of this thread's work: an arena serves only the place it was taken for.
  std::function<std::int64_t()> place = [] { return std::int64_t{0}; };
  std::function<std::size_t()> device = [] { return std::size_t{0}; };  // of this thread's work, less than kMaxDevices
  std::function<void()> poll = [] {};                                   // frees blocks that other streams are done with
  std::function<void(Bytes)> make_room = [](Bytes) {};                  // before an arena is taken
  std::function<void(Bytes)> require_no_more = [](Bytes) {};            // throws if it would raise the peak of reserved memory
};
inline constexpr std::size_t kMaxDevices = 64;

struct Arena {
  char* base;
  Bytes bytes;
  std::int64_t place;
  Slots slots;
  enum { kActive, kKept, kRetired } state = kActive;
};

// All arenas of a process. The owner's mutex is held during every call but place(), device() and poll(). Methods that take the
// lock release it while the source takes or frees memory: the default allocator may call back.
class Arenas {
 public:
  explicit Arenas(Source source) : source_(std::move(source)) {}

  Bytes alignment() const { return source_.alignment; }
  std::int64_t place() const { return source_.place(); }
  std::size_t device() const { return source_.device(); }
  void poll() const { source_.poll(); }

  // A kept arena of this place that is large enough, else a new one; kept arenas of the place that are too small are given back
  // first. no_more: throws rather than raise the peak of reserved memory.
  Arena* find(Bytes bytes, std::int64_t place, std::unique_lock<std::mutex>& lock, bool no_more = false) {
    for (auto& [base, arena] : arenas_) {
      if (arena.state != Arena::kKept || arena.place != place) continue;
      arena.state = arena.bytes >= bytes ? Arena::kActive : Arena::kRetired;
      if (arena.state == Arena::kActive) return &arena;
    }
    give_back(lock);
    const Bytes taken = taken_for(bytes);
    lock.unlock();
    source_.make_room(taken);
    if (no_more) source_.require_no_more(taken);
    char* base = static_cast<char*>(source_.take(taken));
    lock.lock();
    return &arenas_.try_emplace(base, Arena{base, taken, place, {}}).first->second;
  }

  // Bytes of a new arena.
  Bytes taken_for(Bytes bytes) const { return std::max(bytes, source_.alignment); }

  // The arena that holds a block, or nullptr. O(log arenas).
  Arena* of(const void* block) {
    auto arena = arenas_.upper_bound(static_cast<const char*>(block));
    if (arena == arenas_.begin()) return nullptr;
    --arena;
    return static_cast<const char*>(block) < arena->second.base + arena->second.bytes ? &arena->second : nullptr;
  }

  // Retires all arenas of a state: give_back() frees them once they hold no block.
  void retire(decltype(Arena::state) state) {
    for (auto& [base, arena] : arenas_)
      if (arena.state == state) arena.state = Arena::kRetired;
  }

  // Gives retired arenas without blocks back to the default allocator.
  void give_back(std::unique_lock<std::mutex>& lock) {
    std::vector<char*> bases;
    std::erase_if(arenas_, [&](const auto& entry) {
      const Arena& arena = entry.second;
      const bool done = arena.state == Arena::kRetired && arena.slots.empty();
      if (done) bases.push_back(arena.base);
      return done;
    });
    lock.unlock();
    for (char* base : bases) source_.give(base);
    lock.lock();
  }

  // Bytes of all arenas: active, kept, and waiting for their last block.
  Bytes held_bytes() const {
    Bytes sum = 0;
    for (const auto& [base, arena] : arenas_) sum += arena.bytes;
    return sum;
  }

 private:
  Source source_;
  std::map<const char*, Arena> arenas_;  // by their first address
};

}  // namespace olla::replay
