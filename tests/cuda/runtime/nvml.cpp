// libnvidia-ml: expandable segments ask it about links between devices. There are none.
#define STANDIN_NVML(name, result) \
  extern "C" __attribute__((visibility("default"))) int name() { return result; }
constexpr int kNotSupported = 3;

STANDIN_NVML(nvmlInit_v2, 0)
STANDIN_NVML(nvmlDeviceGetHandleByPciBusId_v2, 0)
STANDIN_NVML(nvmlDeviceGetNvLinkRemoteDeviceType, kNotSupported)
STANDIN_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2, kNotSupported)
STANDIN_NVML(nvmlSystemGetCudaDriverVersion_v2, kNotSupported)
STANDIN_NVML(nvmlDeviceGetGpuFabricInfoV, kNotSupported)
extern "C" __attribute__((visibility("default"))) int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  return *count = 0;
}
