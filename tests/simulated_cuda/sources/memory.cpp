// Memory of the devices, with a limit for each, and pinned memory of the host.
#include "devices.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace simulated {
namespace {
constexpr size_t kHeader = 64;  // as aligned as what follows

struct Header {
  int64_t num_bytes;
  int device;
  c10::StreamId stream;
};

std::array<std::atomic<int64_t>, kMostDevices> live{};
std::array<std::atomic<int64_t>, kMostDevices> peak{};

size_t rounded(size_t num_bytes) { return (num_bytes + kHeader - 1) / kHeader * kHeader; }

void release(void* address) {
  if (address == nullptr) return;
  char* start = static_cast<char*>(address) - kHeader;
  const auto* header = reinterpret_cast<Header*>(start);
  live.at(header->device) -= header->num_bytes;
  std::free(start);
}

std::string in_units(int64_t num_bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(num_bytes) / (1 << 20));
  return text;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    start();
    const int device = current_device();
    check_health(device);
    const auto wanted = static_cast<int64_t>(num_bytes);
    const int64_t now = live.at(device) += wanted;
    if (now > most_bytes()) {
      live.at(device) -= wanted;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, kTitle, " out of memory. Tried to allocate ", in_units(wanted), ". GPU ", device,
          " has a total capacity of ", in_units(most_bytes()), " of which ", in_units(most_bytes() - now + wanted),
          " is free.");
    }
    auto* start_of_block = static_cast<char*>(std::aligned_alloc(kHeader, kHeader + rounded(num_bytes)));
    *reinterpret_cast<Header*>(start_of_block) = {wanted, device, current_stream(device).id()};
    std::memset(start_of_block + kHeader, kPoison, num_bytes);
    for (int64_t most = peak.at(device); now > most && !peak.at(device).compare_exchange_weak(most, now);) {
    }
    void* address = start_of_block + kHeader;
    return {address, address, &release, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // of tensors: `record_use`
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = live_bytes(index);
    stats.allocated_bytes[0].peak = peak_bytes(index);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {most_bytes() - live_bytes(index), most_bytes()};
  }
};
DeviceMemory device_memory;
const bool is_registered = (c10::SetAllocator(kType, &device_memory), true);

std::mutex pinned_lock;
std::map<const char*, size_t>& pinned_blocks() {
  static std::map<const char*, size_t> all;
  return all;
}

void unpin(void* address) {
  if (address == nullptr) return;
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned_blocks().erase(static_cast<char*>(address));
  }
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    start();  // the driver allocates it
    void* address = std::aligned_alloc(kHeader, std::max(rounded(num_bytes), kHeader));
    std::memset(address, kPoison, num_bytes);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned_blocks()[static_cast<char*>(address)] = std::max<size_t>(num_bytes, 1);
    return {address, address, &unpin, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};
PinnedMemory pinned_memory;
}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned_blocks().upper_bound(static_cast<const char*>(address));
  if (after == pinned_blocks().begin()) return false;
  const auto& [start_of_block, num_bytes] = *--after;
  return static_cast<const char*>(address) < start_of_block + num_bytes;
}

c10::StreamId stream_of_memory(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const char*>(tensor.storage().data());
  return bytes == nullptr ? 0 : reinterpret_cast<const Header*>(bytes - kHeader)->stream;
}

int64_t live_bytes(int index) { return live.at(index_of(index)); }
int64_t peak_bytes(int index) { return peak.at(index_of(index)); }
void reset_peak(int index) { peak.at(index_of(index)) = live_bytes(index); }

int64_t most_bytes() {
  const char* told = std::getenv("SIMULATED_GPU_BYTES");
  return told ? std::atoll(told) : int64_t(16) << 30;
}

}  // namespace simulated
