// Kernels: launched on their stream, where they do nothing.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "work.hpp"

using namespace standin;

namespace {

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(cudaStream_t stream, const char* call) {
  const Lock lock(mutex());
  RETURN(enqueue(stream, [] {}, call));
}
template <class Handle>
Handle any_handle() {
  return reinterpret_cast<Handle>(std::uintptr_t{8});
}

}  // namespace

STANDIN_API void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(std::calloc(1, sizeof(void*))); }
STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}
STANDIN_API void __cudaUnregisterFatBinary(void** binary) { std::free(binary); }
STANDIN_API char __cudaInitModule(void**) { return 1; }
STANDIN_API void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
STANDIN_API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
STANDIN_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
STANDIN_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
STANDIN_API cudaError_t __cudaGetKernel(cudaKernel_t* to, const void* host) {
  return *to = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host)), cudaSuccess;
}
STANDIN_API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
  return launch(stream, __func__);
}
STANDIN_API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
  return launch(stream, __func__);
}
STANDIN_API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
  return launch(stream, __func__);
}
STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launch(config->stream, __func__);
}
STANDIN_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void*) {
  *to = {};
  to->maxThreadsPerBlock = 1024;
  to->numRegs = 32;
  to->ptxVersion = to->binaryVersion = 90;
  to->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                               unsigned) {
  return *blocks = 2, cudaSuccess;
}
STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  return *blocks = 2, cudaSuccess;
}
STANDIN_API cudaError_t cudaLibraryLoadData(cudaLibrary_t* to, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*,
                                            void**, unsigned) {
  return *to = any_handle<cudaLibrary_t>(), cudaSuccess;
}
STANDIN_API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
STANDIN_API cudaError_t cudaLibraryGetKernel(cudaKernel_t* to, cudaLibrary_t, const char*) {
  return *to = any_handle<cudaKernel_t>(), cudaSuccess;
}
STANDIN_API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

// Kernels of the driver's API: Triton's, and what torch compiles at run time.

#undef cuLinkCreate
#undef cuLinkAddData

STANDIN_API CUresult cuModuleLoad(CUmodule* to, const char*) { return *to = any_handle<CUmodule>(), CUDA_SUCCESS; }
STANDIN_API CUresult cuModuleLoadData(CUmodule* to, const void*) { return cuModuleLoad(to, nullptr); }
STANDIN_API CUresult cuModuleLoadDataEx(CUmodule* to, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoad(to, nullptr);
}
STANDIN_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuModuleGetFunction(CUfunction* to, CUmodule, const char*) {
  return *to = any_handle<CUfunction>(), CUDA_SUCCESS;
}
STANDIN_API CUresult cuFuncGetAttribute(int* to, CUfunction_attribute attribute, CUfunction) {
  *to = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
  return *blocks = 2, CUDA_SUCCESS;
}
STANDIN_API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  return *clusters = 2, CUDA_SUCCESS;
}
STANDIN_API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    CUstream stream, void**, void**) {
  return static_cast<CUresult>(launch(stream, __func__));
}
STANDIN_API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                               CUstream stream, void**) {
  return static_cast<CUresult>(launch(stream, __func__));
}
STANDIN_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  return static_cast<CUresult>(launch(config->hStream, __func__));
}
STANDIN_API CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
STANDIN_API CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, std::size_t, const char*, unsigned, CUjit_option*,
                                      void**) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
STANDIN_API CUresult cuLinkComplete(CUlinkState, void**, std::size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
STANDIN_API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
