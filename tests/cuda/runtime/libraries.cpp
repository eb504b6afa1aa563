// What torch asks of cuBLAS and cuDNN: calls succeed and compute nothing; handles, heuristics and workspaces have values.
// All their other functions are made by stubs.py: they return 0.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "device.hpp"

using namespace standin;

namespace {

struct Handle {
  void* stream = nullptr;
  int pointer_mode = 0;
  int math_mode = 0;
};
Handle& handle_of(void* handle) { return *static_cast<Handle*>(handle); }
int make_handle(void** to) { return *to = new Handle, 0; }
int destroy_handle(void* handle) { return delete &handle_of(handle), 0; }

}  // namespace

STANDIN_API int cublasCreate_v2(void** to) { return make_handle(to); }
STANDIN_API int cublasDestroy_v2(void* handle) { return destroy_handle(handle); }
STANDIN_API int cublasSetStream_v2(void* handle, void* stream) { return handle_of(handle).stream = stream, 0; }
STANDIN_API int cublasGetStream_v2(void* handle, void** stream) { return *stream = handle_of(handle).stream, 0; }
STANDIN_API int cublasSetPointerMode_v2(void* handle, int mode) { return handle_of(handle).pointer_mode = mode, 0; }
STANDIN_API int cublasGetPointerMode_v2(void* handle, int* mode) { return *mode = handle_of(handle).pointer_mode, 0; }
STANDIN_API int cublasSetMathMode(void* handle, int mode) { return handle_of(handle).math_mode = mode, 0; }
STANDIN_API int cublasGetMathMode(void* handle, int* mode) { return *mode = handle_of(handle).math_mode, 0; }
STANDIN_API int cublasLtCreate(void** to) { return make_handle(to); }
STANDIN_API int cublasLtMatmulDescCreate(void** to, int, int) { return make_handle(to); }
STANDIN_API int cublasLtMatmulDescDestroy(void* handle) { return destroy_handle(handle); }
STANDIN_API int cublasLtMatrixLayoutCreate(void** to, int, std::uint64_t, std::uint64_t, std::int64_t) { return make_handle(to); }
STANDIN_API int cublasLtMatrixLayoutDestroy(void* handle) { return destroy_handle(handle); }
STANDIN_API int cublasLtMatmulPreferenceCreate(void** to) { return make_handle(to); }
STANDIN_API int cublasLtMatmulPreferenceDestroy(void* handle) { return destroy_handle(handle); }
STANDIN_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  struct Result {  // cublasLtMatmulHeuristicResult_t
    std::uint64_t algorithm[8];
    std::size_t workspace;
    int state;
    float waves;
    int reserved[4];
  };
  *static_cast<Result*>(results) = {{}, std::size_t{1} << 20, 0, 1, {}};
  return *count = 1, 0;
}

// cuDNN's graphs: descriptors keep what they are told, and one engine suits everything.

namespace {

enum Attribute {  // cudnnBackendAttributeName_t
  kHeuristicResults = 202,
  kPlanWorkspace = 402,
  kEngineSharedMemory = 304,
  kEngineIndex = 1301,
};
constexpr int kDescriptors = 15;  // cudnnBackendAttributeType_t

struct Value {
  std::int64_t count;
  std::string bytes;
};
using Descriptor = std::map<int, Value>;

std::size_t size_of(int type) {
  switch (type) {
    case 2:
    case 24:
      return 1;
    case 0:
    case 3:
    case 5:
    case 6:
    case kDescriptors:
      return 8;
    case 26:
      return 16;
    default:
      return 4;
  }
}

}  // namespace

STANDIN_API int cudnnCreate(void** to) { return make_handle(to); }
STANDIN_API int cudnnDestroy(void* handle) { return destroy_handle(handle); }
STANDIN_API int cudnnBackendCreateDescriptor(int, void** to) { return *to = new Descriptor, 0; }
STANDIN_API int cudnnBackendInitialize(void*) { return 0; }
STANDIN_API int cudnnBackendDestroyDescriptor(void* it) { return delete static_cast<Descriptor*>(it), 0; }
STANDIN_API int cudnnBackendFinalize(void*) { return 0; }
STANDIN_API int cudnnBackendExecute(void*, void*, void*) { return 0; }
STANDIN_API int cudnnBackendSetAttribute(void* it, int name, int type, std::int64_t count, const void* data) {
  const auto bytes = static_cast<std::size_t>(count) * size_of(type);
  (*static_cast<Descriptor*>(it))[name] = {count, std::string(static_cast<const char*>(data), bytes)};
  return 0;
}
STANDIN_API int cudnnBackendGetAttribute(void* it, int name, int type, std::int64_t room, std::int64_t* count, void* to) {
  std::int64_t ignored = 0;
  if (count == nullptr) count = &ignored;
  switch (name) {
    case kHeuristicResults:
      return *count = 1, 0;
    case kPlanWorkspace:
      return *static_cast<std::int64_t*>(to) = static_cast<std::int64_t>(setting("STANDIN_WORKSPACE", 4e6)), *count = 1, 0;
    case kEngineIndex:
    case kEngineSharedMemory:
      return std::memset(to, 0, size_of(type)), *count = 1, 0;
    default:
      break;
  }
  const auto& values = *static_cast<Descriptor*>(it);
  const auto found = values.find(name);
  *count = found != values.end() ? found->second.count : 0;
  if (found == values.end() || to == nullptr || type == kDescriptors || room <= 0) return 0;
  std::memcpy(to, found->second.bytes.data(), std::min(found->second.bytes.size(), static_cast<std::size_t>(room) * size_of(type)));
  return 0;
}
#define STANDIN_CREATE(name) \
  STANDIN_API int cudnnCreate##name##Descriptor(void** to) { return make_handle(to); }
STANDIN_CREATE(Tensor)
STANDIN_CREATE(Filter)
STANDIN_CREATE(Convolution)
STANDIN_CREATE(Activation)
STANDIN_CREATE(Dropout)
STANDIN_CREATE(Pooling)
STANDIN_CREATE(RNN)
STANDIN_CREATE(RNNData)
STANDIN_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*,
                                                                         std::size_t* bytes) {
  return *bytes = 0, 0;
}
STANDIN_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*,
                                                                  std::size_t* bytes) {
  return *bytes = 0, 0;
}
STANDIN_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, std::size_t* bytes) {
  return *bytes = 1024, 0;
}
