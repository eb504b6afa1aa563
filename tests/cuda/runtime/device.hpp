// A stand-in for the CUDA runtime and driver, for tests on machines without a GPU: put in front of torch's CUDA build.
//
// Real are sizes, addresses and the order of allocations, copies and memsets, and streams, events and captures as the
// documentation has them. Kernels do nothing here; numbers.cpp gives those of torch's operators the numbers of a CPU.
//
//   STANDIN_MEMORY=85e9       bytes of each device
//   STANDIN_DEVICES=1         how many there are
//   STANDIN_SCHEDULE=now      when queued work runs, see work.hpp
//   STANDIN_TRACE=1           calls that allocate, free, capture or fail, on stderr; 2: work too
//   STANDIN_WORKSPACE=4e6     bytes that a convolution asks for
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr int kMaxDevices = 16;
constexpr std::size_t kPage = std::size_t{2} << 20;  // granularity of device memory

double setting(const char* name, double otherwise);
int num_devices();
std::size_t device_bytes();

// One lock for all state. Work runs under it, and may call back.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

int& current_device();  // of this thread

// Counts memory of a device as used; false where it has not so much left, or where a test asked for a failure.
bool take(int device, std::size_t bytes);
void give_back(int device, std::size_t bytes);
std::size_t used_bytes(int device);

// Remembers a failure for cudaGetLastError, and passes it on.
cudaError_t result(cudaError_t error, const char* call);
#define RETURN(error) return ::standin::result(error, __func__)

__attribute__((format(printf, 2, 3))) void trace(int level, const char* format, ...);

inline std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace standin
