// An accelerator for tests: two devices whose memory is the host's, and whose operators are the
// CPU's. It registers what a package of a backend does: an allocator with statistics, a guard,
// hooks, and the kernels that the fallback to the CPU needs.
//
// STANDIN_MIB: the memory of a device. STANDIN_LACKS: what it does not have, some of "devices
// statistics allocated peak requested reserved info class" (its error's class: as MPS's).
// Its history is kept by standin.py, which is told of each event.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kUnit = 512; // an allocated block's size is a multiple of it
thread_local c10::DeviceIndex current_device = 0;

bool lacks(const char* what) {
  const char* lacking = std::getenv("STANDIN_LACKS");
  return lacking != nullptr && std::strstr(lacking, what) != nullptr;
}

c10::DeviceIndex device_count() {
  return lacks("devices") ? 0 : kDevices;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  if (device >= 0) {
    std::swap(device, current_device);
  }
  return device;
}

size_t memory_of_a_device() {
  const char* mib = std::getenv("STANDIN_MIB");
  return (mib == nullptr ? size_t{1024} : std::strtoull(mib, nullptr, 10)) << 20;
}

using Observer = void (*)(const char* action, size_t address, size_t size, int device);
Observer observer = nullptr;

void tell(const char* action, void* address, size_t size, c10::DeviceIndex device) {
  if (observer != nullptr) { // it takes Python's lock, so no other may be held
    observer(action, reinterpret_cast<size_t>(address), size, device);
  }
}

struct Block {
  c10::DeviceIndex device;
  size_t size;
  size_t requested;
};

void free_block(void* pointer);

// Each request is a segment of its own. A freed one serves the next request of its size.
struct StandInAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t requested) override {
    const auto device = current_device;
    void* pointer = nullptr;
    if (requested > 0) {
      const std::lock_guard<std::mutex> lock(mutex);
      const size_t size = (requested + kUnit - 1) / kUnit * kUnit;
      pointer = take(device, size, requested);
      blocks[pointer] = {device, size, requested};
      auto& own = stats[device];
      own.allocation[0].increase(1);
      own.active[0].increase(1);
      own.allocated_bytes[0].increase(size);
      own.active_bytes[0].increase(size);
      own.requested_bytes[0].increase(requested);
    }
    if (requested > 0) {
      tell("alloc", pointer, requested, device);
    }
    return {pointer, pointer, free_block, c10::Device(kType, device)};
  }

  void release(void* pointer) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto found = blocks.find(pointer);
    if (found == blocks.end()) {
      return;
    }
    const Block block = found->second;
    blocks.erase(found);
    lock.unlock();
    tell("free", pointer, block.size, block.device);
    lock.lock();
    auto& own = stats[block.device];
    own.allocation[0].decrease(1);
    own.active[0].decrease(1);
    own.allocated_bytes[0].decrease(block.size);
    own.active_bytes[0].decrease(block.size);
    own.requested_bytes[0].decrease(block.requested);
    cached[block.device].emplace(block.size, pointer);
  }

  void empty(c10::DeviceIndex device) {
    for (const auto& [size, pointer] : cached[device]) {
      std::free(pointer);
      stats[device].segment[0].decrease(1);
      stats[device].reserved_bytes[0].decrease(size);
    }
    cached[device].clear();
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return free_block;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard<std::mutex> lock(mutex);
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      empty(device);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    auto told = stats[device];
    if (lacks("allocated")) {
      told.allocated_bytes = {};
    }
    if (lacks("peak")) {
      told.allocated_bytes[0].peak = 0;
    }
    if (lacks("requested")) {
      told.requested_bytes = told.active_bytes = {};
    }
    if (lacks("reserved")) {
      told.segment = told.reserved_bytes = {};
    }
    return told;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!lacks("info"), "the stand-in does not tell its memory");
    const std::lock_guard<std::mutex> lock(mutex);
    const size_t total = memory_of_a_device();
    return {total - stats[device].reserved_bytes[0].current, total};
  }

 private:
  void* take(c10::DeviceIndex device, size_t size, size_t requested) {
    const auto found = cached[device].find(size);
    if (found != cached[device].end()) {
      void* pointer = found->second;
      cached[device].erase(found);
      return pointer;
    }
    auto& own = stats[device];
    const size_t total = memory_of_a_device();
    if (own.reserved_bytes[0].current + size > total) {
      empty(device);
      own.num_alloc_retries += 1;
    }
    if (own.reserved_bytes[0].current + size > total) {
      own.num_ooms += 1;
      TORCH_CHECK(
          !lacks("class"),
          "standin backend out of memory (standin allocated: ",
          c10::CachingAllocator::format_size(own.reserved_bytes[0].current),
          "). Tried to allocate ",
          c10::CachingAllocator::format_size(requested),
          " on private pool.");
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "standin out of memory. Tried to allocate ",
          c10::CachingAllocator::format_size(requested),
          ". GPU ",
          static_cast<int>(device),
          " has a total capacity of ",
          c10::CachingAllocator::format_size(total),
          ".");
    }
    own.segment[0].increase(1);
    own.reserved_bytes[0].increase(size);
    return std::malloc(size);
  }

  template <class Function>
  void each(c10::DeviceIndex device, Function change) {
    auto& own = stats[device];
    for (auto* array :
         {&own.allocation, &own.segment, &own.active, &own.allocated_bytes, &own.reserved_bytes,
          &own.active_bytes, &own.requested_bytes}) {
      change((*array)[0]);
    }
  }

  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
  std::multimap<size_t, void*> cached[kDevices];
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];
};

StandInAllocator& allocator() {
  static auto* instance = new StandInAllocator(); // tensors may outlive static objects
  return *instance;
}

void free_block(void* pointer) {
  allocator().release(pointer);
}

struct AllocatorWithoutStatistics final : c10::Allocator {
  c10::DataPtr allocate(size_t requested) override {
    return allocator().allocate(requested);
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

} // namespace

extern "C" __attribute__((visibility("default"))) void standin_observe(Observer told) {
  observer = told;
}

namespace {

c10::Allocator* allocator_of_torch() {
  static AllocatorWithoutStatistics plain;
  return lacks("statistics") ? static_cast<c10::Allocator*>(&plain) : &allocator();
}

const bool is_set = [] {
  c10::SetAllocator(kType, allocator_of_torch());
  return true;
}();

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device)));
  return at::detail::empty_generic(
      size, allocator_of_torch(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(kType, current_device)));
  return at::detail::empty_strided_generic(
      size, stride, allocator_of_torch(), kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor of_the_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  of_the_host(to).copy_(of_the_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return of_the_host(tensor).item();
}

// There are no fused kernels of attention: 0 is the composite one.
int64_t fused_sdp_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
}

} // namespace
