// Memory outside the heap, for bookkeeping about blocks in the heap.
#pragma once

#include <memory_resource>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>
#endif

namespace olla::replay {

#if defined(__unix__) || defined(__APPLE__)
// Whole pages from the system. Bookkeeping in the heap would lie between the recorded blocks, which are then neither merged nor
// returned when freed: a recorded training loop has up to a tenth more resident (bench/pytorch/bench_process.py, unet).
class Pages final : public std::pmr::memory_resource {
  static std::size_t whole(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
  }
  void* do_allocate(std::size_t bytes, std::size_t /*alignment*/) override {
    void* found = mmap(nullptr, whole(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    return found;
  }
  void do_deallocate(void* block, std::size_t bytes, std::size_t /*alignment*/) override { munmap(block, whole(bytes)); }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
};

inline std::pmr::memory_resource* pages() {
  static Pages& found = *new Pages;  // never destroyed: recordings may outlive static objects
  return &found;
}
#else
inline std::pmr::memory_resource* pages() { return std::pmr::new_delete_resource(); }
#endif

}  // namespace olla::replay
