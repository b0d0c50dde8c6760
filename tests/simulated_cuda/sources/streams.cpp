// Streams: work that has been given to a device is done when somebody waits for it, not before.
#include "devices.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace simulated {
namespace {

struct Queued {
  uint64_t ticket;
  bool is_for_host;
  Task run;
};

// Bytes that a kernel of a stream wrote. The memory holds poison, and `real` what is there for those who waited.
struct Hidden {
  uint64_t ticket;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  size_t offset;
  std::vector<char> real;
};

struct State {
  uint64_t last_ticket = 0;
  std::deque<Queued> queue;
  std::vector<Hidden> hidden;
};

std::recursive_mutex lock;
std::map<std::pair<int, c10::StreamId>, State> states;
std::atomic<c10::StreamId> last_stream{0};
thread_local std::map<int, c10::StreamId> current_streams;
thread_local int depth = 0;

State& state_of(int device, c10::StreamId stream) { return states[{device, stream}]; }
State& state_of(const c10::Stream& stream) { return state_of(stream.device_index(), stream.id()); }

void swap_in(State& state) {
  for (auto& one : state.hidden)
    if (auto storage = one.storage.lock(); storage && storage->nbytes() >= one.offset + one.real.size())
      std::memcpy(static_cast<char*>(storage->mutable_data()) + one.offset, one.real.data(), one.real.size());
}

void swap_out(State& state) {
  std::erase_if(state.hidden, [](const Hidden& one) { return one.storage.expired(); });
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  for (auto& one : state.hidden) {  // all are read before any is poisoned: they may overlap
    auto storage = one.storage.lock();
    if (storage->nbytes() < one.offset + one.real.size()) one.real.clear();
    std::memcpy(one.real.data(), static_cast<char*>(storage->mutable_data()) + one.offset, one.real.size());
    storages.push_back(std::move(storage));
  }
  for (size_t i = 0; i < storages.size(); ++i) {
    const auto& one = state.hidden[i];
    std::memset(static_cast<char*>(storages[i]->mutable_data()) + one.offset, kPoison, one.real.size());
  }
}

void run_queue(State& state, uint64_t ticket, bool is_host_waiting) {
  std::deque<Queued> kept;
  std::deque<Queued> now;
  now.swap(state.queue);
  for (auto& one : now) {
    if (one.ticket > ticket || (one.is_for_host && !is_host_waiting)) kept.push_back(std::move(one));
    else one.run();
  }
  for (auto& one : state.queue) kept.push_back(std::move(one));
  state.queue.swap(kept);
}

// Make what the stream did up to a ticket visible to everybody.
void publish(State& state, uint64_t ticket, bool is_host_waiting) {
  swap_in(state);
  ++depth;
  run_queue(state, ticket, is_host_waiting);
  --depth;
  std::erase_if(state.hidden, [&](const Hidden& one) { return one.ticket <= ticket; });
  swap_out(state);
}
}  // namespace

c10::Stream current_stream(int index) {
  const auto device = index_of(index);
  const auto found = current_streams.find(device);
  return c10::Stream(c10::Stream::UNSAFE, {kType, device}, found == current_streams.end() ? 0 : found->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  current_streams[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(int index) { return c10::Stream(c10::Stream::UNSAFE, {kType, index_of(index)}, ++last_stream); }

void enqueue(const c10::Stream& stream, Task task) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto& state = state_of(stream);
  state.queue.push_back({++state.last_ticket, false, std::move(task)});
}

void enqueue_for_host(const c10::Stream& stream, Task task) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto& state = state_of(stream);
  state.queue.push_back({++state.last_ticket, true, std::move(task)});
}

Mark mark_of(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return {
      stream.device_index(), stream.id(), state_of(stream).last_ticket,
      std::chrono::duration<double, std::milli>(now).count()};
}

void make_wait(const c10::Stream& stream, const Mark& mark) {
  if (stream.device_index() == mark.device && stream.id() == mark.stream) return;
  std::lock_guard<std::recursive_mutex> held(lock);
  publish(state_of(mark.device, mark.stream), mark.ticket, false);
  // who waits for this stream from the host has waited for the other one too
  enqueue_for_host(stream, [mark] { host_wait(mark); });
}

void host_wait(const Mark& mark) {
  std::lock_guard<std::recursive_mutex> held(lock);
  check_health(mark.device);
  publish(state_of(mark.device, mark.stream), mark.ticket, true);
}

void host_wait(const c10::Stream& stream) { host_wait(mark_of(stream)); }

void host_wait_for_device(int index) {
  const auto device = index_of(index);
  std::lock_guard<std::recursive_mutex> held(lock);
  check_health(device);
  for (auto& [key, state] : states)
    if (key.first == device) publish(state, state.last_ticket, true);
}

bool in_kernel() { return depth > 0; }

Launch::Launch(const std::vector<c10::Device>& devices) : is_outermost_(depth == 0) {
  if (is_outermost_) {
    start();
    for (const auto& device : devices) {
      check_health(device.index());
      const auto stream = current_stream(device.index());
      if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
    }
    ++counts.kernels;
    lock.lock();
    for (const auto& stream : streams_) {
      auto& state = state_of(stream);
      swap_in(state);
      ++depth;
      run_queue(state, state.last_ticket, false);
      --depth;
    }
    if (streams_.empty() || std::all_of(streams_.begin(), streams_.end(), [](const auto& one) { return one.id() == 0; }))
      lock.unlock();  // kernels of default streams may run beside each other
  }
  ++depth;
}

Launch::~Launch() {
  --depth;
  if (!is_outermost_) return;
  bool is_held = false;
  for (const auto& stream : streams_) is_held = is_held || stream.id() != 0;
  if (!is_held) return;
  for (const auto& stream : streams_) {
    if (stream.id() == 0) continue;
    auto& state = state_of(stream);
    const auto ticket = ++state.last_ticket;
    for (const auto& tensor : written_) {
      if (tensor.device() != stream.device() || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
      const auto& storage = tensor.storage();
      state.hidden.push_back(
          {ticket, c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()),
           static_cast<size_t>(tensor.storage_offset()) * tensor.element_size(),
           std::vector<char>(tensor.numel() * tensor.element_size())});
    }
    swap_out(state);
  }
  lock.unlock();
}

void Launch::wrote(const at::Tensor& tensor) {
  if (is_outermost_ && tensor.defined() && tensor.device().type() == kType) written_.push_back(tensor);
}

}  // namespace simulated
