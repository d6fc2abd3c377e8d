// What torch's CPU build asks of CUDA: that a device is there, its current stream, and memory that is pinned.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <map>
#include <mutex>

static std::map<const char*, size_t> blocks;
static std::mutex lock;

struct Pinned final : c10::Allocator {
  static void release(void* p) {
    std::lock_guard<std::mutex> held(lock);
    blocks.erase(static_cast<char*>(p));
    free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = aligned_alloc(64, (n / 64 + 1) * 64);
    std::lock_guard<std::mutex> held(lock);
    blocks[static_cast<char*>(p)] = n;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
static Pinned pinned;

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    auto at = static_cast<const char*>(data);
    auto next = blocks.upper_bound(at);
    return next != blocks.begin() && at < (--next)->first + next->second;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  static c10::Device first() { return {c10::kCUDA, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, first()); }
  c10::Device getDevice() const override { return first(); }
  c10::Device exchangeDevice(c10::Device) const override { return first(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::kCUDA, &guard);
