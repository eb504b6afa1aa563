// Asks the allocator of CUDA for memory as kernels do, with no tensors and no Python between two requests.
#include <c10/core/Allocator.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

// Nanoseconds of a request and the end of an earlier one: `num_live` blocks are alive at once, of eight sizes in turn.
extern "C" __attribute__((visibility("default"))) double nanoseconds(std::int64_t num_requests, std::int64_t num_live) {
  constexpr std::array<std::size_t, 8> kSizes{512, 65536, 4096, 262144, 20480, 1024, 131072, 8192};
  c10::Allocator& allocator = *c10::GetAllocator(c10::DeviceType::CUDA);
  std::vector<c10::DataPtr> live(static_cast<std::size_t>(num_live));
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < num_requests; ++i) {
    c10::DataPtr& block = live[static_cast<std::size_t>(i % num_live)];
    block.clear();
    block = allocator.allocate(kSizes[static_cast<std::size_t>(i) % kSizes.size()]);
  }
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / static_cast<double>(num_requests);
}
