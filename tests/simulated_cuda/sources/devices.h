// Simulated CUDA devices: the host's memory under CUDA's rules. What every other file here uses.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace simulated {

// Without `SIMULATED_DEVICE_TYPE` the devices are torch's CUDA devices. With the value `privateuse1` they are of the type
// that torch leaves to kinds of devices from outside, under this name.
constexpr auto kNameFromOutside = "fieldgpu";
inline const bool kIsCuda = [] {
  const char* told = std::getenv("SIMULATED_DEVICE_TYPE");
  return told == nullptr || std::string(told) != "privateuse1";
}();
inline const auto kType = kIsCuda ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
inline const auto kKey = kIsCuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
inline const std::string kTitle = kIsCuda ? "CUDA" : "FieldGPU";  // in the texts of errors

// TORCH_LIBRARY_IMPL for a key that is not known before it runs.
#define SIMULATED_KERNELS(name_space, name)                                                              \
  static void name(torch::Library&);                                                                     \
  static const torch::detail::TorchLibraryInit name##_registered(                                        \
      torch::Library::IMPL, &name, name_space, std::make_optional(kKey), __FILE__, __LINE__);            \
  void name(torch::Library& library)

constexpr size_t kMostDevices = 64;
constexpr int kPoison = 0xff;  // NaN of every floating type: memory that nobody has written, or nobody may read yet

// Numbers since the last reset, over all devices of this process.
struct Counts {
  std::atomic<int64_t> reads{0};      // scalars read, such as by `item()`
  std::atomic<int64_t> to_host{0};    // copies from a device
  std::atomic<int64_t> to_device{0};  // copies to a device
  std::atomic<int64_t> waits{0};      // times that the host waited for a device, reads and blocking copies included
  std::atomic<int64_t> kernels{0};
};
extern Counts counts;

// -- devices (devices.cpp)

// Physical devices that `CUDA_VISIBLE_DEVICES` (or `FIELDGPU_VISIBLE_DEVICES`) leaves of `SIMULATED_GPUS`, in its order.
std::vector<int> visible_devices();
c10::DeviceIndex num_devices();
std::string uuid_of(int physical);

c10::DeviceIndex current_device();
void set_current_device(int index);
c10::DeviceIndex index_of(int index);  // -1 is the current one

// A process that asks the driver for anything owns the devices: children that are forked later have none.
void claim();
c10::DeviceIndex count_by_driver() noexcept;
// Use a device, for which the driver makes a context.
void start();
bool is_started_here();
bool is_started_elsewhere();

// A device that fails fails from then on, as one that has met an illegal memory access does.
void break_device(int index, const std::string& error);
void check_health(int index);

// -- memory (memory.cpp)

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
c10::StreamId stream_of_memory(const at::Tensor& tensor);  // on which it was allocated
int64_t live_bytes(int index);
int64_t peak_bytes(int index);
int64_t most_bytes();  // of each device
void reset_peak(int index);

// -- random numbers (generators.cpp)

at::Generator& default_generator(int index);
at::Generator new_generator(int index);
// Return a generator of the CPU for one draw, and advance the device's.
at::Generator next_draw(const at::Generator& generator);

// -- streams (streams.cpp)

using Task = std::function<void()>;

c10::Stream current_stream(int index);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int index);

// Run when the stream gets its next kernel, or when somebody waits for it. `written` is a tensor that it writes.
void enqueue(const c10::Stream& stream, Task task, at::Tensor written = {});
// Run when the host waits for it: a copy from the device. A task may enqueue what belongs to it.
void enqueue_for_host(const c10::Stream& stream, Task task);

// Return whether a stream has waited for what the default stream wrote into a tensor.
bool is_seen(const c10::Stream& stream, const at::Tensor& tensor);
// Keep a tensor's memory while copies of this stream are under way.
void record_use(const at::Tensor& tensor, const c10::Stream& stream);

// A point in a stream's work.
struct Mark {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t ticket = 0;
  double milliseconds = 0;
  bool is_polled = false;
  std::map<int, uint64_t> seen;  // of default streams, by device
};
Mark mark_of(const c10::Stream& stream);
void make_wait(const c10::Stream& stream, const Mark& mark);
void host_wait(const Mark& mark);
void host_wait(const c10::Stream& stream);
void host_wait_for_device(int index);
// Return whether the work has ended. If nobody has waited for it, it has not the first time, and has the second.
bool poll(Mark& mark);
bool poll(const c10::Stream& stream);

// A kernel on the current stream of each device that it uses. Streams do not see each other's results until they have
// waited: the memory holds NaN meanwhile.
class Launch {
 public:
  explicit Launch(const std::vector<c10::Device>& devices);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  void wrote(const at::Tensor& tensor);
  // Return a result that was computed on the host.
  at::Tensor made(const at::Tensor& host, c10::Device device);

 private:
  struct Covered {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    size_t offset;
    std::vector<char> real;
  };
  void cover();

  bool is_outermost_;
  std::vector<c10::Stream> streams_;
  std::vector<at::Tensor> written_;
  std::vector<Covered> covered_;
  std::unique_lock<std::recursive_mutex> held_;
};
// Return whether this thread is inside of a kernel, whose own copies do not count.
bool in_kernel();

// -- tensors (kernels.cpp)

// Return a CPU tensor over the same memory. A kernel may resize it, and it has memory of its own then.
at::Tensor on_host(const at::Tensor& tensor);
std::optional<at::Tensor> on_host(const std::optional<at::Tensor>& tensor);
at::Tensor on_device(const at::Tensor& host, c10::Device device);
// Run a kernel of the CPU on the same memory.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key);
void resize_storage(const at::Tensor& tensor, int64_t num_bytes);
// Return another tensor over the same memory, which Python does not know: it can be freed without Python's lock.
at::Tensor alias_of(const at::Tensor& tensor);

// -- sparse tensors (sparse.cpp)

std::array<at::Tensor, 2> parts_of(const at::Tensor& sparse);  // indices and values
at::Tensor sparse_on_host(const at::Tensor& tensor);
at::Tensor sparse_on_device(const at::Tensor& host, c10::Device device);
void replace_sparse(const at::Tensor& tensor, const at::Tensor& host);

}  // namespace simulated
