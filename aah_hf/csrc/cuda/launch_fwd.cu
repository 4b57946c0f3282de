// aah_cuda_fwd: the cache of work lists, and the order of launches. No device code here.
#include "launch_fwd.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace aah {
namespace {

thread_local char last_error[256] = "";

int failed(cudaError_t error, const char* doing) {
  std::snprintf(last_error, sizeof(last_error), "%s: %s (%s)", doing, cudaGetErrorString(error), cudaGetErrorName(error));
  return AAH_ERROR_CUDA;
}

#define AAH_CUDA(call)                                                  \
  do {                                                                  \
    const cudaError_t error = (call);                                   \
    if (error != cudaSuccess) return failed(error, #call);              \
  } while (0)

struct Device {
  int index, processors;
};

int current_device(Device* device) {
  AAH_CUDA(cudaGetDevice(&device->index));
  int major = 0;
  AAH_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device->index));
  AAH_CUDA(cudaDeviceGetAttribute(&device->processors, cudaDevAttrMultiProcessorCount, device->index));
  return major >= 8 ? AAH_OK : AAH_ERROR_DEVICE;
}

// A plan, and its copy in memory of the device: windows, entries, merges.
struct List {
  Device device = {};
  Plan plan;
  char* memory = nullptr;
  int64_t bytes = 0;
  const int32_t* window = nullptr;
  const Entry *entries = nullptr, *merges = nullptr;
  bool pinned = false;  // a captured graph holds its address
  List() = default;
  List(const List&) = delete;
  ~List() { cudaFree(memory); }
};

// Allocating is refused on a thread that captures, unless it says that it means it.
struct RelaxedCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

struct Stream {
  cudaStream_t handle = nullptr;
  ~Stream() {
    if (handle) cudaStreamDestroy(handle);
  }
};

int upload(const Problem& problem, List* list) {
  const int64_t heads = problem.q_heads * static_cast<int64_t>(sizeof(int32_t));
  const int64_t entries = static_cast<int64_t>(list->plan.entries.size() * sizeof(Entry));
  const int64_t merges = static_cast<int64_t>(list->plan.merges.size() * sizeof(Entry));
  std::vector<char> host(heads + entries + merges);
  std::memcpy(host.data(), problem.window, heads);
  if (entries) std::memcpy(host.data() + heads, list->plan.entries.data(), entries);
  if (merges) std::memcpy(host.data() + heads + entries, list->plan.merges.data(), merges);
  const RelaxedCapture relaxed;
  AAH_CUDA(cudaMalloc(reinterpret_cast<void**>(&list->memory), host.size()));
  // A stream of its own that waits for nothing else; the host waits for this copy only, so the list is there before any
  // kernel that reads it is enqueued, on whatever stream.
  Stream stream;
  AAH_CUDA(cudaStreamCreateWithFlags(&stream.handle, cudaStreamNonBlocking));
  AAH_CUDA(cudaMemcpyAsync(list->memory, host.data(), host.size(), cudaMemcpyHostToDevice, stream.handle));
  AAH_CUDA(cudaStreamSynchronize(stream.handle));
  list->bytes = static_cast<int64_t>(host.size());
  list->window = reinterpret_cast<const int32_t*>(list->memory);
  list->entries = reinterpret_cast<const Entry*>(list->memory + heads);
  list->merges = reinterpret_cast<const Entry*>(list->memory + heads + entries);
  return AAH_OK;
}

// Lists by what they were made from, least recently used last. Never destroyed: at the end of the process the driver may be
// gone before us.
class Lists {
 public:
  static constexpr int64_t kBytes = 64 << 20;
  static constexpr size_t kCount = 1024;

  // The list for a problem; with_memory: also on the device. While capturing nothing is dropped.
  int find(const Problem& problem, const Device& device, bool with_memory, bool capturing, std::shared_ptr<List>* out) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key = key_of(problem, device);
    auto found = index_.find(key);
    if (found == index_.end()) {
      const auto list = std::make_shared<List>();
      list->device = device;
      list->plan = make_plan(problem);
      order_.emplace_front(key, list);
      found = index_.emplace(key, order_.begin()).first;
    } else {
      order_.splice(order_.begin(), order_, found->second);
    }
    const std::shared_ptr<List> list = found->second->second;
    if (with_memory && !list->memory) {
      if (const int status = upload(problem, list.get())) return status;
      bytes_ += list->bytes;
    }
    if (with_memory && capturing) list->pinned = true;
    if (!capturing && (bytes_ > kBytes || order_.size() > kCount)) shrink();
    *out = list;
    return AAH_OK;
  }

 private:
  typedef std::vector<int64_t> Key;
  typedef std::list<std::pair<Key, std::shared_ptr<List>>> Order;

  static Key key_of(const Problem& p, const Device& d) {
    Key key = {d.index,  d.processors, p.shape.warps, p.shape.row_blocks, p.shape.keys,   p.batch, p.q_len, p.kv_len,
               p.q_heads, p.sinks,      p.limit,       p.queries_last,     p.documents, p.max_q, p.max_k};
    key.insert(key.end(), p.window, p.window + p.q_heads);
    return key;
  }

  // Drops the older half, but for pinned lists and the newest. Kernels may still be reading a list, so its device is waited
  // for first: rare, and never on the way of a program that repeats its shapes. Where that is refused (another thread is
  // capturing), the cache stays too large until the next time.
  void shrink() {
    int home = 0, waited_for = -1;
    if (cudaGetDevice(&home) != cudaSuccess) return;
    const RelaxedCapture relaxed;
    for (auto it = std::prev(order_.end()); it != order_.begin() && (bytes_ > kBytes / 2 || order_.size() > kCount / 2);) {
      const auto candidate = it--;
      const List& list = *candidate->second;
      // one that others hold too is about to be launched
      if (list.pinned || candidate->second.use_count() > 1) continue;
      if (list.memory && waited_for != list.device.index) {
        const bool idle = cudaSetDevice(list.device.index) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
        cudaSetDevice(home);
        if (!idle) {
          cudaGetLastError();
          return;
        }
        waited_for = list.device.index;
      }
      bytes_ -= list.bytes;
      index_.erase(candidate->first);
      order_.erase(candidate);
    }
  }

  std::mutex mutex_;
  Order order_;
  std::map<Key, Order::iterator> index_;
  int64_t bytes_ = 0;
};

Lists& lists() {
  static Lists* const all = new Lists;
  return *all;
}

// Partial results: outputs, then log-sum-exps.
int64_t partial_numbers(const Plan& plan, const Problem& problem, int width) {
  return batch_rows(problem) * plan.partials * problem.shape.queries() * width;
}
int64_t workspace_bytes(const Plan& plan, const Problem& problem, int width) {
  return 4 * (partial_numbers(plan, problem, width) + partial_numbers(plan, problem, 1));
}

cudaError_t launch_forward(const Launch& launch, int width) {
  switch (width) {
    case 64: return launch_forward_64(launch);
    case 80: return launch_forward_80(launch);
    case 96: return launch_forward_96(launch);
    case 128: return launch_forward_128(launch);
    case 192: return launch_forward_192(launch);
    default: return launch_forward_256(launch);
  }
}

int workspace(const AahParams& p, int64_t max_q, int64_t max_k, int64_t* bytes) {
  *bytes = 0;
  Device device;
  if (const int status = current_device(&device)) return status;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  const Problem problem = problem_of(p, max_q, max_k, device.processors);
  std::shared_ptr<List> list;
  if (const int status = lists().find(problem, device, false, true, &list)) return status;
  *bytes = workspace_bytes(list->plan, problem, padded_dim(static_cast<int>(p.head_dim)));
  return AAH_OK;
}

int forward(const AahParams& p, int64_t max_q, int64_t max_k, void* workspace, cudaStream_t stream) {
  Device device;
  if (const int status = current_device(&device)) return status;
  if (p.batch == 0 || p.q_len == 0) return AAH_OK;
  const Problem problem = problem_of(p, max_q, max_k, device.processors);
  const int width = padded_dim(static_cast<int>(p.head_dim));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  AAH_CUDA(cudaStreamIsCapturing(stream, &capture));
  std::shared_ptr<List> list;
  const bool capturing = capture != cudaStreamCaptureStatusNone;
  if (const int status = lists().find(problem, device, true, capturing, &list)) return status;
  const Plan& plan = list->plan;
  if (!plan.merges.empty() && !workspace) return AAH_ERROR_MEMORY;

  const int64_t rows = batch_rows(problem), blocks = static_cast<int64_t>(plan.entries.size()) * rows;
  if (blocks * (problem.shape.queries() / kMergeRows) > INT32_MAX || plan.partials * rows > INT32_MAX) return AAH_ERROR_SHAPE;
  Launch launch = {arguments_of(p), p.dtype, device.index, blocks, stream};
  launch.arguments.window = list->window;
  launch.arguments.entries = list->entries;
  launch.arguments.merges = list->merges;
  launch.arguments.rows = static_cast<int32_t>(rows);
  launch.arguments.partials = static_cast<int32_t>(plan.partials);
  launch.arguments.partial_out = static_cast<float*>(workspace);
  launch.arguments.partial_lse = static_cast<float*>(workspace) + partial_numbers(plan, problem, width);
  cudaError_t error = launch_forward(launch, width);
  if (error != cudaSuccess) return failed(error, "launching the forward kernel");
  if (plan.merges.empty()) return AAH_OK;
  launch.blocks = static_cast<int64_t>(plan.merges.size()) * rows;
  error = launch_merge(launch, problem.shape.queries(), width);
  return error == cudaSuccess ? AAH_OK : failed(error, "launching the merge kernel");
}

// Nothing may throw across the C border.
template <class F>
int guarded(const AahParams* p, F f) {
  last_error[0] = 0;
  if (!p) return AAH_ERROR_SHAPE;
  if (const int status = check(*p)) return status;
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return AAH_ERROR_MEMORY;
  }
}

}  // namespace
}  // namespace aah

extern "C" int aah_cuda_fwd_workspace(const AahParams* params, int64_t max_q, int64_t max_k, int64_t* bytes) {
  return aah::guarded(params, [&] { return aah::workspace(*params, max_q, max_k, bytes); });
}

extern "C" int aah_cuda_fwd(const AahParams* params, int64_t max_q, int64_t max_k, void* workspace, void* stream) {
  return aah::guarded(
      params, [&] { return aah::forward(*params, max_q, max_k, workspace, static_cast<cudaStream_t>(stream)); });
}

extern "C" const char* aah_cuda_error(void) { return aah::last_error; }

extern "C" int aah_cuda_devices(void) {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver: not an error that a later launch should report
    return 0;
  }
  for (int i = 0; i < count; ++i) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) == cudaSuccess && major >= 8) ++usable;
  }
  return usable;
}
