// Streams: work that has been given to a device is done when somebody waits for it, not before.
#include "devices.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace simulated {
namespace {

struct Queued {
  uint64_t ticket;
  bool is_for_host;
  Task run;
  at::Tensor written;  // of a device, if the task writes one
};

// Bytes of a device's memory.
struct Range {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  size_t offset;
  size_t size;
  uint64_t ticket;  // of the work that wrote them
};

// Bytes that a kernel of a stream wrote. The memory holds poison, and `real` what is there for those who waited.
struct Hidden {
  Range range;
  std::vector<char> real;
};

struct State {
  uint64_t last_ticket = 0;
  uint64_t done = 0;  // what the host has waited for
  bool is_polled = false;
  std::deque<Queued> queue;
  std::vector<Hidden> hidden;
  // Of the default stream, whose results are in place: what the host has not waited for. Other streams see poison there
  // for as long as their kernels run.
  std::map<std::pair<const c10::StorageImpl*, size_t>, Range> written;
  size_t most_written = 64;
  std::map<int, uint64_t> seen;  // of each device, what its default stream had done when this one waited for it
  std::vector<at::Storage> recorded;  // kept while copies of this stream are under way
};

std::recursive_mutex lock;
std::map<std::pair<int, c10::StreamId>, State> states;
std::atomic<c10::StreamId> last_stream{0};
thread_local std::map<int, c10::StreamId> current_streams;
thread_local int depth = 0;
thread_local uint64_t running = 0;  // the ticket of the task that runs

struct InKernel {
  InKernel() { ++depth; }
  ~InKernel() { --depth; }
};

State& state_of(int device, c10::StreamId stream) { return states[{device, stream}]; }
State& state_of(const c10::Stream& stream) { return state_of(stream.device_index(), stream.id()); }

char* bytes_of(c10::StorageImpl& storage, const Range& range) {
  return storage.nbytes() < range.offset + range.size ? nullptr
                                                       : static_cast<char*>(storage.mutable_data()) + range.offset;
}

std::optional<Range> range_of(const at::Tensor& tensor, uint64_t ticket) {
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return std::nullopt;
  const auto size = static_cast<size_t>(tensor.numel() * tensor.element_size());
  return Range{
      c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()),
      static_cast<size_t>(tensor.storage_offset()) * tensor.element_size(), size, ticket};
}

void swap_in(State& state) {
  for (auto& one : state.hidden)
    if (auto storage = one.range.storage.lock())
      if (char* bytes = bytes_of(*storage, one.range)) std::memcpy(bytes, one.real.data(), one.real.size());
}

void swap_out(State& state) {
  std::vector<std::pair<c10::intrusive_ptr<c10::StorageImpl>, Hidden>> kept;
  for (auto& one : state.hidden) {  // all are read before any is poisoned: they may overlap
    auto storage = one.range.storage.lock();  // another thread may free it now
    char* bytes = storage ? bytes_of(*storage, one.range) : nullptr;
    if (bytes == nullptr) continue;
    std::memcpy(one.real.data(), bytes, one.real.size());
    kept.emplace_back(std::move(storage), std::move(one));
  }
  state.hidden.clear();
  for (auto& [storage, one] : kept) {
    std::memset(bytes_of(*storage, one.range), kPoison, one.range.size);
    state.hidden.push_back(std::move(one));
  }
}

// Run what may run up to a ticket, and return the tensors that it wrote.
std::vector<at::Tensor> run_queue(State& state, uint64_t ticket, bool is_host_waiting) {
  std::vector<at::Tensor> written;
  std::deque<Queued> kept;
  std::deque<Queued> now;
  now.swap(state.queue);
  InKernel inside;
  while (!now.empty()) {
    auto one = std::move(now.front());
    now.pop_front();
    if (one.ticket > ticket || (one.is_for_host && !is_host_waiting)) {
      kept.push_back(std::move(one));
      continue;
    }
    running = one.ticket;
    try {
      one.run();
      running = 0;
    } catch (...) {
      running = 0;
      for (auto* rest : {&kept, &now}) state.queue.insert(state.queue.end(), rest->begin(), rest->end());
      throw;
    }
    if (one.written.defined()) written.push_back(one.written);
  }
  for (auto& one : state.queue) kept.push_back(std::move(one));
  state.queue.swap(kept);
  if (state.queue.empty()) state.recorded.clear();
  return written;
}

void note_written(State& state, const at::Tensor& tensor, uint64_t ticket) {
  auto range = range_of(tensor, ticket);
  if (!range) return;
  if (state.written.size() >= state.most_written) {
    std::erase_if(state.written, [](const auto& one) { return one.second.storage.expired(); });
    state.most_written = std::max<size_t>(64, 2 * state.written.size());
  }
  state.written.insert_or_assign({tensor.storage().unsafeGetStorageImpl(), range->offset}, std::move(*range));
}

// Make what the stream did up to a ticket visible to everybody.
void publish(int device, c10::StreamId stream, uint64_t ticket, bool is_host_waiting) {
  auto& state = state_of(device, stream);
  swap_in(state);
  for (const auto& tensor : run_queue(state, ticket, is_host_waiting))
    if (stream == 0) note_written(state, tensor, ticket);
  if (is_host_waiting) {
    run_queue(state, ticket, true);  // what those have enqueued for the host
    state.done = std::max(state.done, ticket);
    std::erase_if(state.written, [&](const auto& one) { return one.second.ticket <= ticket; });
  }
  std::erase_if(state.hidden, [&](const Hidden& one) { return one.range.ticket <= ticket; });
  swap_out(state);
}

// What the default stream of a device wrote and these streams have not waited for.
std::vector<Range> unseen(int device, const std::vector<c10::Stream>& streams) {
  std::vector<Range> found;
  uint64_t seen = 0;
  for (const auto& stream : streams) {
    if (stream.device_index() == device && stream.id() == 0) return found;
    const auto& of_stream = state_of(stream).seen;
    if (const auto one = of_stream.find(device); one != of_stream.end()) seen = std::max(seen, one->second);
  }
  for (const auto& [_, range] : state_of(device, 0).written)
    if (range.ticket > seen) found.push_back(range);
  return found;
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

void enqueue(const c10::Stream& stream, Task task, at::Tensor written) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto& state = state_of(stream);
  state.queue.push_back({++state.last_ticket, false, std::move(task), std::move(written)});
}

void enqueue_for_host(const c10::Stream& stream, Task task) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto& state = state_of(stream);
  state.queue.push_back({running ? running : ++state.last_ticket, true, std::move(task), {}});
}

bool is_seen(const c10::Stream& stream, const at::Tensor& tensor) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const auto mine = range_of(tensor, 0);
  if (!mine) return true;
  for (const auto& one : unseen(stream.device_index(), {stream})) {
    const auto storage = one.storage.lock();
    if (storage.get() == tensor.storage().unsafeGetStorageImpl() && one.offset < mine->offset + mine->size &&
        mine->offset < one.offset + one.size)
      return false;
  }
  return true;
}

void record_use(const at::Tensor& tensor, const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto& state = state_of(stream);
  if (!state.queue.empty()) state.recorded.push_back(tensor.storage());
}

Mark mark_of(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto& state = state_of(stream);
  Mark mark;
  mark.device = stream.device_index();
  mark.stream = stream.id();
  mark.ticket = state.last_ticket;
  mark.milliseconds = std::chrono::duration<double, std::milli>(now).count();
  mark.seen = state.seen;
  if (mark.stream == 0) mark.seen[mark.device] = mark.ticket;
  return mark;
}

void make_wait(const c10::Stream& stream, const Mark& mark) {
  if (stream.device_index() == mark.device && stream.id() == mark.stream) return;
  std::lock_guard<std::recursive_mutex> held(lock);
  publish(mark.device, mark.stream, mark.ticket, false);
  auto& seen = state_of(stream).seen;
  for (const auto& [device, ticket] : mark.seen) seen[device] = std::max(seen[device], ticket);
  // who waits for this stream from the host has waited for the other one too
  enqueue_for_host(stream, [mark] { host_wait(mark); });
}

void host_wait(const Mark& mark) {
  std::lock_guard<std::recursive_mutex> held(lock);
  check_health(mark.device);
  publish(mark.device, mark.stream, mark.ticket, true);
}

void host_wait(const c10::Stream& stream) { host_wait(mark_of(stream)); }

bool poll(Mark& mark) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const auto& state = state_of(mark.device, mark.stream);
  if (state.done >= mark.ticket || mark.is_polled) {
    host_wait(mark);
    return true;
  }
  mark.is_polled = true;
  return false;
}

bool poll(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto mark = mark_of(stream);
  auto& is_polled = state_of(stream).is_polled;
  mark.is_polled = is_polled;
  is_polled = !poll(mark);
  return !is_polled;
}

void host_wait_for_device(int index) {
  const auto device = index_of(index);
  std::lock_guard<std::recursive_mutex> held(lock);
  check_health(device);
  for (auto& [key, state] : states)
    if (key.first == device) publish(device, key.second, state.last_ticket, true);
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
    held_ = std::unique_lock<std::recursive_mutex>(lock);
    for (const auto& stream : streams_) {
      auto& state = state_of(stream);
      swap_in(state);
      for (auto& tensor : run_queue(state, state.last_ticket, false)) written_.push_back(std::move(tensor));
    }
    if (std::all_of(streams_.begin(), streams_.end(), [](const auto& one) { return one.id() == 0; }))
      held_.unlock();  // kernels of default streams may run beside each other
    else
      cover();
  }
  ++depth;
}

// Poison what these streams have not waited for, until the kernel has run.
void Launch::cover() {
  std::set<int> devices;
  for (const auto& stream : streams_) devices.insert(stream.device_index());
  for (const int device : devices)
    for (const auto& range : unseen(device, streams_)) {
      auto storage = range.storage.lock();
      char* bytes = storage ? bytes_of(*storage, range) : nullptr;
      if (bytes == nullptr) continue;
      covered_.push_back({std::move(storage), range.offset, {bytes, bytes + range.size}});
    }
  for (const auto& one : covered_)
    std::memset(static_cast<char*>(one.storage->mutable_data()) + one.offset, kPoison, one.real.size());
}

Launch::~Launch() {
  --depth;
  if (!is_outermost_) return;
  if (!held_.owns_lock()) held_.lock();
  for (const auto& stream : streams_) {
    auto& state = state_of(stream);
    const auto ticket = ++state.last_ticket;
    for (const auto& tensor : written_) {
      if (tensor.device() != stream.device()) continue;
      if (stream.id() == 0) {
        note_written(state, tensor, ticket);
      } else if (auto range = range_of(tensor, ticket)) {
        std::vector<char> real(range->size);
        state.hidden.push_back({std::move(*range), std::move(real)});
      }
    }
    if (stream.id() != 0) swap_out(state);
  }
  if (covered_.empty()) return;
  for (const auto& one : covered_)
    if (one.storage->nbytes() >= one.offset + one.real.size())
      std::memcpy(static_cast<char*>(one.storage->mutable_data()) + one.offset, one.real.data(), one.real.size());
  for (const auto& stream : streams_) {
    for (const auto& one : state_of(stream).hidden)
      if (auto storage = one.range.storage.lock())
        if (char* bytes = bytes_of(*storage, one.range)) std::memset(bytes, kPoison, one.range.size);
  }
}

void Launch::wrote(const at::Tensor& tensor) {
  if (!is_outermost_ || !tensor.defined() || tensor.device().type() != kType) return;
  if (tensor.is_sparse()) {
    for (const auto& part : parts_of(tensor)) written_.push_back(part);
  } else {
    written_.push_back(tensor);
  }
}

at::Tensor Launch::made(const at::Tensor& host, c10::Device device) {
  auto result = on_device(host, device);
  wrote(result);
  return result;
}

}  // namespace simulated
