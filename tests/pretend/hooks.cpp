// What torch's CPU build asks of CUDA: that it is there, and the current stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
  }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
