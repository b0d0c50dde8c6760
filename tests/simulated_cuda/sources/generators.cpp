// Generators as CUDA's: a seed and an offset that every draw advances. The numbers are the CPU's, seeded from both.
#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

namespace simulated {
namespace {
uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : GeneratorImpl({kType, index}, c10::DispatchKeySet(kKey)) {}

  at::Generator next() {
    host_.set_current_seed(mixed(seed_ ^ mixed(offset_)));
    offset_ += 4;
    return host_;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->seed_ = seed_;
    other->offset_ = offset_;
    return other;
  }

 private:
  at::Generator host_ = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};
}  // namespace

at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < static_cast<int>(kMostDevices); ++i) made.push_back(new_generator(i));
    return made;
  }();
  return all.at(index_of(index));
}

at::Generator new_generator(int index) { return at::make_generator<Generator>(index_of(index)); }

at::Generator next_draw(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace simulated
