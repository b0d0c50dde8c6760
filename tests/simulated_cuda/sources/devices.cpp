// Devices: which there are, who may use them, and what torch asks of them.
#include "devices.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <sstream>

namespace simulated {

Counts counts;

namespace {
thread_local c10::DeviceIndex current = 0;
std::atomic<pid_t> owner{0};
std::atomic<pid_t> latest{0};  // the process that used a device last

std::mutex visible_lock;
pid_t visible_to = 0;
std::vector<int> visible;  // to this process, which asks for its variables once

std::mutex errors_lock;
std::array<std::string, kMostDevices> errors;
std::atomic<bool> has_errors{false};

int num_physical() {
  const char* told = std::getenv("SIMULATED_GPUS");
  return told ? std::min<int>(std::atoi(told), kMostDevices) : 0;
}

}  // namespace

std::string uuid_of(int physical) {
  std::ostringstream text;
  text << "GPU-5157a7ed-0000-0000-0000-" << std::string(10, '0') << (physical < 10 ? "0" : "") << physical;
  return text.str();
}

std::vector<int> visible_now() {
  std::vector<int> found;
  const int all = num_physical();
  const char* told = std::getenv(kIsCuda ? "CUDA_VISIBLE_DEVICES" : "FIELDGPU_VISIBLE_DEVICES");
  if (told == nullptr) {
    for (int i = 0; i < all; ++i) found.push_back(i);
    return found;
  }
  std::stringstream words{std::string(told)};
  for (std::string word; std::getline(words, word, ',');) {
    int position = -1;
    for (int i = 0; i < all; ++i)
      if (word == std::to_string(i) || (word.size() > 4 && uuid_of(i).rfind(word, 0) == 0)) position = i;
    if (position < 0) break;  // CUDA takes those before the first that it does not know
    if (std::find(found.begin(), found.end(), position) != found.end()) return {};  // and none if one is named twice
    found.push_back(position);
  }
  return found;
}

std::vector<int> visible_devices() {
  std::lock_guard<std::mutex> held(visible_lock);
  return visible_to == getpid() ? visible : visible_now();
}

c10::DeviceIndex num_devices() { return static_cast<c10::DeviceIndex>(visible_devices().size()); }

c10::DeviceIndex current_device() { return current; }

void set_current_device(int index) {
  if (index < 0 || index == current) return;
  TORCH_CHECK(index < num_devices(), kTitle, " error: invalid device ordinal");
  current = static_cast<c10::DeviceIndex>(index);
}

c10::DeviceIndex index_of(int index) { return index < 0 ? current : static_cast<c10::DeviceIndex>(index); }

void claim() {
  const pid_t here = getpid();
  pid_t none = 0;
  if (owner.compare_exchange_strong(none, here)) {
    std::lock_guard<std::mutex> held(visible_lock);
    visible = visible_now();
    visible_to = here;
    return;
  }
  TORCH_CHECK(
      owner == here,
      "Cannot re-initialize ", kTitle, " in forked subprocess. To use ", kTitle,
      " with multiprocessing, you must use the 'spawn' start method");
}

void start() {
  if (latest == getpid()) return;
  claim();
  latest = getpid();
}

bool is_started_here() { return latest == getpid(); }
bool is_started_elsewhere() { return owner != 0 && owner != getpid(); }

void break_device(int index, const std::string& error) {
  std::lock_guard<std::mutex> held(errors_lock);
  errors.at(index_of(index)) = error;
  has_errors = true;
}

void check_health(int index) {
  if (!has_errors) return;
  std::lock_guard<std::mutex> held(errors_lock);
  const auto& error = errors.at(index_of(index));
  if (error.empty()) return;
  constexpr int32_t kIllegalAddress = 700;
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kIllegalAddress, kTitle + " error: " + error);
}

// The driver counts devices for whom asks, and starts for it.
c10::DeviceIndex count_by_driver() noexcept {
  try {
    if (num_devices() > 0) claim();
    return num_devices();
  } catch (const c10::Error&) {
    return 0;
  }
}

namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current}; }
  c10::DeviceIndex deviceCount() const noexcept override { return count_by_driver(); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    claim();
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kType, index_of(device.index())});
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    start();
    return new_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return poll(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counts.waits;
    host_wait(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    ++counts.waits;
    host_wait_for_device(index);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    start();
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = mark_of(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) make_wait(stream, *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || poll(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override {
    ++counts.waits;
    if (event != nullptr) host_wait(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return static_cast<Mark*>(last)->milliseconds - static_cast<Mark*>(first)->milliseconds;
  }
};
const c10::impl::DeviceGuardImplRegistrar guard_registered(kType, new Guard());
}  // namespace

// What torch asks of every kind of accelerator, besides what it asks of CUDA alone.
template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count_by_driver() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_started_here(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override { return new_generator(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, current}; }
  c10::DeviceIndex deviceCount() const override { return count_by_driver(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};

// torch asks for its hooks before an extension can be loaded, and keeps them; see module.cpp
struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return count_by_driver() > 0; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return count_by_driver(); }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    ++counts.waits;
    host_wait_for_device(index);
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::DeviceIndex current_device() const override { return current; }
};

struct HooksFromOutside final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DeviceGuard guard(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

const at::CUDAHooksInterface& cuda_hooks() {
  static CudaHooks one;
  return one;
}

at::PrivateUse1HooksInterface& hooks_from_outside() {
  static HooksFromOutside one;
  return one;
}

}  // namespace simulated
