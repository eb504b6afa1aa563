// What the tests of planned memory share: an allocator in front of which it stands, and a small plan.
#pragma once

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "test.hpp"
#include "torch/memory.hpp"

namespace olla::replay {

inline constexpr Bytes kAlignment = 64;

// A default allocator that knows what it has lent.
struct Heap {
  std::set<void*> lent;
  Memory memory{{kAlignment, [this](Bytes bytes) { return take(bytes); }, [this](void* block) { give(block); }}};

  void* take(Bytes bytes) {
    if (bytes > (Bytes{1} << 40)) throw std::bad_alloc();
    return *lent.insert(std::malloc(bytes)).first;
  }
  void give(void* block) {
    CHECK_EQ(lent.erase(block), 1u);
    std::free(block);
  }

  // What the allocator of a device does.
  void* allocate(Bytes bytes) {
    if (!Memory::inside()) return take(bytes);
    if (void* block = memory.planned(bytes)) return block;
    void* block = take(bytes);
    if (Memory::recording()) memory.record(block, bytes);
    return block;
  }
  void free(void* block) {
    if (!memory.freed(block)) give(block);
  }
  Offset offset(void* block) { return static_cast<char*>(block) - static_cast<char*>(memory.arena().first); }
};

// Op 0 asks for 100 and 64 bytes, op 1 for 64 and, outside the arena, 32.
inline Plan small_plan() { return {256, kAlignment, {0, 2, 4}, {100, 64, 64, 32}, {0, 128, 192, kNotInArena}}; }

// Records a step of which nothing is planned.
inline void record(Memory& memory, OpId num_ops) {
  memory.activate({0, kAlignment, std::vector<std::int64_t>(static_cast<std::size_t>(num_ops) + 1), {}, {}}, true);
}

template <class Error, class Body>
std::string message(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "(nothing thrown)";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace olla::replay
