// cuda/launch_fwd.cu itself, on a runtime that is not there: its work lists, workspace and cache run as they are, its kernels
// on the emulator. Compiled for one head size (AAH_DIM), with sim/fake_cuda on the include path.
#include "../cuda/launch_fwd.cu"

#include <cstdlib>
#include <set>

#include "run.h"

namespace {

// What a test asks for and looks at.
struct Fake {
  int device = 0, processors = 132, major = 9;
  bool capturing = false, no_memory = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  int allocations = 0, device_waits = 0, launches = 0;
  std::set<void*> live;
  std::set<const void*> captured;  // lists that a captured graph reads
  std::string error;
} fake;

// What a capture forbids is an error, unless the thread has said that it means it.
bool refused() { return fake.capturing && fake.mode != cudaStreamCaptureModeRelaxed; }

cudaError_t launched(const std::string& error, const aah::ForwardArguments& a) {
  ++fake.launches;
  if (fake.error.empty()) fake.error = error;
  if (fake.capturing) fake.captured.insert(a.window);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) { return *device = fake.device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return fake.device = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? fake.processors : fake.major;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ++fake.device_waits;
  return refused() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (refused()) return cudaErrorStreamCaptureUnsupported;
  if (fake.no_memory) return cudaErrorMemoryAllocation;
  ++fake.allocations;
  *memory = std::malloc(bytes);
  fake.live.insert(*memory);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory && fake.captured.count(memory) && fake.error.empty()) fake.error = "freed memory that a graph reads";
  fake.live.erase(memory);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (!stream && fake.capturing) return cudaErrorStreamCaptureUnsupported;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return std::free(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return refused() ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = fake.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const cudaStreamCaptureMode old = fake.mode;
  fake.mode = *mode;
  *mode = old;
  return cudaSuccess;
}

namespace aah {

#define AAH_LAUNCH(dim)                                                                                               \
  cudaError_t launch_forward_##dim(const Launch& launch) {                                                            \
    if (dim != AAH_DIM) return launched("this emulator is for another head size", launch.arguments);                  \
    return launched(sim::run_forward(launch.dtype, launch.arguments, static_cast<int>(launch.blocks), {1, true}),     \
                    launch.arguments);                                                                                \
  }
AAH_LAUNCH(64)
AAH_LAUNCH(80)
AAH_LAUNCH(96)
AAH_LAUNCH(128)
AAH_LAUNCH(192)
AAH_LAUNCH(256)

cudaError_t launch_merge(const Launch& launch, int tile_queries, int width) {
  const sim::Merge merge = {launch.arguments, launch.dtype, tile_queries, width};
  return launched(sim::run_merge(merge, static_cast<int>(launch.blocks), {1, true}), launch.arguments);
}

}  // namespace aah

// aah_cuda_fwd with a workspace of exactly the size it asks for. 0, an AahStatus, or -1 and the emulator's `error`.
// counts: allocations so far, live allocations, waits for the device, launches.
extern "C" AAH_EXPORT int aah_sim_launch(const AahParams* params, int64_t max_q, int64_t max_k, int processors, int major,
                                         int capturing, int no_memory, int* counts, char* error, int error_bytes) {
  fake.processors = processors;
  fake.major = major;
  fake.capturing = capturing != 0;
  fake.no_memory = no_memory != 0;
  fake.error.clear();
  int64_t bytes = 0;
  int status = aah_cuda_fwd_workspace(params, max_q, max_k, &bytes);
  char* workspace = bytes > 0 ? static_cast<char*>(std::malloc(bytes)) : nullptr;
  if (workspace) std::memset(workspace, 0xff, bytes);
  if (!status) status = aah_cuda_fwd(params, max_q, max_k, workspace, nullptr);
  std::free(workspace);
  const int now[] = {fake.allocations, static_cast<int>(fake.live.size()), fake.device_waits, fake.launches};
  std::memcpy(counts, now, sizeof(now));
  std::snprintf(error, error_bytes, "%s", status == AAH_ERROR_CUDA ? aah_cuda_error() : fake.error.c_str());
  return fake.error.empty() ? status : -1;
}
