// The driver's API, as far as torch and Triton call it: devices, contexts, and virtual memory for expandable segments.
#include <cstdio>
#include <map>
#include <string_view>

#include "memory.hpp"

using namespace standin;

namespace {

CUcontext context() { return reinterpret_cast<CUcontext>(std::uintptr_t{16}); }
CUresult error_text(CUresult error, const char** to) {
  return *to = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in", CUDA_SUCCESS;
}

struct Physical {
  std::size_t bytes;
  int device;
};
std::map<CUmemGenericAllocationHandle, Physical>& physical() {
  static auto& all = *new std::map<CUmemGenericAllocationHandle, Physical>;
  return all;
}
void* address(CUdeviceptr at) { return reinterpret_cast<void*>(at); }

CUresult address_reserve(CUdeviceptr* to, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  const Lock lock(mutex());
  *to = reinterpret_cast<CUdeviceptr>(reserve(bytes));
  return *to == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult address_free(CUdeviceptr at, std::size_t bytes) { return unreserve(address(at), bytes), CUDA_SUCCESS; }
CUresult create(CUmemGenericAllocationHandle* to, std::size_t bytes, const CUmemAllocationProp* how, unsigned long long) {
  static CUmemGenericAllocationHandle last = 0;
  const Lock lock(mutex());
  const int device = how->location.id;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  physical()[*to = ++last] = {bytes, device};
  trace(1, "create %zu bytes on device %d, %zu used", bytes, device, used_bytes(device));
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const Lock lock(mutex());
  const auto found = physical().find(handle);
  if (found == physical().end()) return CUDA_ERROR_INVALID_VALUE;
  give_back(found->second.device, found->second.bytes);
  physical().erase(found);
  return CUDA_SUCCESS;
}
CUresult map_at(CUdeviceptr at, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const Lock lock(mutex());
  return map(address(at), bytes, physical().at(handle).device), CUDA_SUCCESS;
}
CUresult unmap_at(CUdeviceptr at, std::size_t bytes) {
  const Lock lock(mutex());
  return unmap(address(at), bytes), CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }
CUresult granularity(std::size_t* to, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *to = kPage, CUDA_SUCCESS;
}
CUresult address_range(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr at) {
  const Lock lock(mutex());
  std::uintptr_t start = 0;
  std::size_t size = 0;
  if (!block_at(at, &start, &size)) return CUDA_ERROR_INVALID_VALUE;
  if (base != nullptr) *base = start;
  if (bytes != nullptr) *bytes = size;
  return CUDA_SUCCESS;
}
CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

#undef cuDeviceTotalMem

STANDIN_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGetCount(int* count) { return *count = num_devices(), CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGet(CUdevice* to, int index) { return *to = index, CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGetAttribute(int* to, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(to, static_cast<cudaDeviceAttr>(attribute), device));
}
STANDIN_API CUresult cuDeviceGetName(char* to, int bytes, CUdevice) {
  return std::snprintf(to, static_cast<std::size_t>(bytes), "Stand-in (no GPU)"), CUDA_SUCCESS;
}
STANDIN_API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice) { return *bytes = device_bytes(), CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxGetCurrent(CUcontext* to) { return *to = context(), CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxGetDevice(CUdevice* to) { return *to = current_device(), CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxPopCurrent_v2(CUcontext* to) { return *to = context(), CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxSynchronize() { return static_cast<CUresult>(cudaDeviceSynchronize()); }
STANDIN_API CUresult cuCtxSetLimit(CUlimit, std::size_t) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxGetLimit(std::size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
STANDIN_API CUresult cuStreamGetCtx(CUstream, CUcontext* to) { return *to = context(), CUDA_SUCCESS; }
STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
STANDIN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* to, CUdevice) { return *to = context(), CUDA_SUCCESS; }
STANDIN_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuGetErrorString(CUresult error, const char** to) { return error_text(error, to); }
STANDIN_API CUresult cuGetErrorName(CUresult error, const char** to) { return error_text(error, to); }
STANDIN_API CUresult cuPointerGetAttribute(void* to, CUpointer_attribute attribute, CUdeviceptr at) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(to) = at;
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(to) = context();
      break;
    default:
      *static_cast<int*>(to) = 0;
  }
  return CUDA_SUCCESS;
}

// What torch takes from the driver by name.
STANDIN_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long,
                                                         cudaDriverEntryPointQueryResult* status) {
  static const std::map<std::string_view, void*> kFunctions = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(address_reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(address_free)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map_at)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap_at)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(address_range)},
      {"cuDeviceGet", reinterpret_cast<void*>(cuDeviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(cuDeviceGetAttribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(cuCtxGetCurrent)},
  };
  const auto found = kFunctions.find(name);
  *to = found != kFunctions.end() ? found->second : reinterpret_cast<void*>(not_supported);
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
