// A CUDA device that torch takes for a real one, and that computes nothing.
//
// FakeTensors on it need a device guard (the current device and stream) and hooks (the number of
// devices, which memory is page-locked). Page-locked memory is ordinary memory here; its addresses
// are recorded, so that copies from it can be told from those of pageable memory.
#include <map>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device only_device(c10::DeviceType::CUDA, 0);
const c10::Stream only_stream(c10::Stream::DEFAULT, only_device);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return only_device; }
  c10::Device getDevice() const override { return only_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

struct PageLocked : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr inner = c10::GetCPUAllocator()->allocate(size);
    auto* block = new Block{std::move(inner)};
    std::lock_guard<std::mutex> held(mutex);
    blocks[static_cast<const char*>(block->memory.get())] = size;
    return {block->memory.get(), block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool holds(const void* address) {
    std::lock_guard<std::mutex> held(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(address));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(address) < after->first + std::max<size_t>(after->second, 1);
  }

 private:
  struct Block { c10::DataPtr memory; };
  static void release(void* context);
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

PageLocked page_locked;

void PageLocked::release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> held(page_locked.mutex);
    page_locked.blocks.erase(static_cast<const char*>(block->memory.get()));
  }
  delete block;
}

const bool has_guard = [] {
  auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  place.store(new Guard());
  return true;
}();

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool isPinnedPtr(const void* address) const override { return page_locked.holds(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<CPUGeneratorImpl>();
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
