// What torch's CPU build asks of CUDA: that a device is there, and its current stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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
