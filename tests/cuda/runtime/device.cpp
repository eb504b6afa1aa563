// Devices: what they are, how much of their memory is used, errors and traces.
#include "device.hpp"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace standin {
namespace {

struct Usage {
  std::size_t used = 0;
  std::size_t peak = 0;
};
std::array<Usage, kMaxDevices> usages;
long long allocations_left = -1;  // until all fail; negative: none does
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

double setting(const char* name, double otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != 0 ? std::atof(value) : otherwise;
}

int num_devices() {
  static const int count = std::min(kMaxDevices, static_cast<int>(setting("STANDIN_DEVICES", 1)));
  return count;
}

std::size_t device_bytes() {
  static const auto bytes = static_cast<std::size_t>(setting("STANDIN_MEMORY", 85e9));
  return bytes;
}

std::recursive_mutex& mutex() {
  static auto& mutex = *new std::recursive_mutex;  // outlives every thread
  return mutex;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

bool take(int device, std::size_t bytes) {
  Usage& usage = usages[device];
  const bool failing = allocations_left == 0;
  if (allocations_left > 0) --allocations_left;
  if (failing || usage.used + bytes > device_bytes()) {
    trace(1, "out of memory: %zu bytes asked on device %d, %zu of %zu used", bytes, device, usage.used, device_bytes());
    return false;
  }
  usage.used += bytes;
  usage.peak = std::max(usage.peak, usage.used);
  return true;
}

void give_back(int device, std::size_t bytes) { usages[device].used -= bytes; }
std::size_t used_bytes(int device) { return usages[device].used; }

cudaError_t result(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return error;
  if (error != cudaErrorNotReady) trace(1, "%s: %s", call, cudaGetErrorName(error));
  return last_error = error;
}

void trace(int level, const char* format, ...) {
  static const int most = static_cast<int>(setting("STANDIN_TRACE", 0));
  if (most < level) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("[standin] ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}

}  // namespace standin

using namespace standin;

// For tests, through ctypes: memory of a device, and the request for a failure.

STANDIN_API std::size_t standin_used(int device) {
  const Lock lock(mutex());
  return usages[device].used;
}
// The most bytes used since the last reset.
STANDIN_API std::size_t standin_peak(int device, int reset) {
  const Lock lock(mutex());
  const std::size_t peak = usages[device].peak;
  if (reset != 0) usages[device].peak = usages[device].used;
  return peak;
}
// After so many further allocations all fail for lack of memory; a negative number: none does.
STANDIN_API void standin_fail_after(long long allocations) {
  const Lock lock(mutex());
  allocations_left = allocations;
}

// Errors and versions

STANDIN_API const char* cudaGetErrorName(cudaError_t error) {
  static constexpr std::pair<cudaError_t, const char*> kNames[] = {
      {cudaSuccess, "cudaSuccess"},
      {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
      {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
      {cudaErrorNotReady, "cudaErrorNotReady"},
      {cudaErrorLaunchFailure, "cudaErrorLaunchFailure"},
      {cudaErrorNotSupported, "cudaErrorNotSupported"},
      {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
      {cudaErrorIllegalState, "cudaErrorIllegalState"},
      {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
      {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
      {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge"},
      {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched"},
      {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined"},
      {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation"},
      {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit"},
      {cudaErrorCapturedEvent, "cudaErrorCapturedEvent"},
      {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered"},
      {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
  };
  for (const auto& [value, name] : kNames)
    if (value == error) return name;
  return "an error that the stand-in has no name for";
}
STANDIN_API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}
STANDIN_API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
STANDIN_API cudaError_t cudaPeekAtLastError() { return last_error; }
STANDIN_API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
STANDIN_API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

// Devices, with the figures of an H100

STANDIN_API cudaError_t cudaGetDeviceCount(int* count) { return *count = num_devices(), cudaSuccess; }
STANDIN_API cudaError_t cudaGetDevice(int* device) { return *device = current_device(), cudaSuccess; }
STANDIN_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) RETURN(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  *to = {};
  std::snprintf(to->name, sizeof to->name, "Stand-in (no GPU)");
  std::memset(&to->uuid, device + 1, sizeof to->uuid);
  to->totalGlobalMem = device_bytes();
  to->major = 9;
  to->warpSize = 32;
  to->multiProcessorCount = 132;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxThreadsPerMultiProcessor = 2048;
  to->maxBlocksPerMultiProcessor = 32;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->sharedMemPerBlock = 49152;
  to->sharedMemPerBlockOptin = 232448;
  to->sharedMemPerMultiprocessor = 233472;
  to->reservedSharedMemPerBlock = 1024;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->l2CacheSize = 50 << 20;
  to->memoryBusWidth = 5120;
  to->textureAlignment = 512;
  to->texturePitchAlignment = 32;
  to->memPitch = 2147483647;
  to->totalConstMem = 65536;
  to->unifiedAddressing = to->concurrentKernels = to->cooperativeLaunch = to->managedMemory = to->canMapHostMemory = 1;
  to->hostRegisterSupported = to->memoryPoolsSupported = to->streamPrioritiesSupported = 1;
  to->asyncEngineCount = 3;
  to->pciBusID = device + 1;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  static constexpr cudaDeviceAttr kYes[] = {
      cudaDevAttrCooperativeLaunch,
      cudaDevAttrUnifiedAddressing,
      cudaDevAttrConcurrentKernels,
      cudaDevAttrHostRegisterSupported,
      cudaDevAttrMemoryPoolsSupported,
      cudaDevAttrManagedMemory,
      cudaDevAttrCanUseHostPointerForRegisteredMem,
      cudaDevAttrComputePreemptionSupported,
  };
  cudaDeviceProp is;
  cudaGetDeviceProperties(&is, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = is.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = is.maxThreadsDim[2];
      break;
    case cudaDevAttrMaxGridDimX:
      *value = is.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = is.maxGridSize[1];
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(is.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(is.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(is.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrWarpSize:
      *value = is.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = is.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = is.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = is.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = is.regsPerBlock;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = is.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = is.minor;
      break;
    case cudaDevAttrL2CacheSize:
      *value = is.l2CacheSize;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 2619000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = is.memoryBusWidth;
      break;
    case cudaDevAttrTextureAlignment:
      *value = static_cast<int>(is.textureAlignment);
      break;
    default:
      *value = std::find(std::begin(kYes), std::end(kYes), attribute) != std::end(kYes) ? 1 : 0;
  }
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceGetPCIBusId(char* to, int bytes, int device) {
  std::snprintf(to, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
STANDIN_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
STANDIN_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
STANDIN_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
