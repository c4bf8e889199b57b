// A pretended CUDA device for a PyTorch that is built for CPUs: tensors whose device is `cuda`, in host memory.
//
// Every operation on them runs the CPU's kernel on the same memory. What a real device refuses is refused: operands on
// two devices. So code that chooses devices, streams and transports by the kind of device runs without one.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Memory ---------------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(512, (bytes + 511) / 512 * 512) : nullptr;
    if (memory) std::memset(memory, 0x7f, bytes);  // what nobody wrote is noticed
    return {memory, memory, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;

std::mutex pinned_mutex;
std::unordered_map<void*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    { std::lock_guard<std::mutex> lock(pinned_mutex); pinned.erase(memory); }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(4096, (bytes + 4096) / 4096 * 4096);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[memory] = bytes;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  for (const auto& [begin, bytes] : pinned)
    if (data >= begin && data < static_cast<const char*>(begin) + bytes) return true;
  return false;
}

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(at::DeviceIndex) const override {}
  // The host's kernels draw, from the host's generators.
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

// Tensors of the device and of the host over the same memory -----------------------------------------------------------

at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  return made;
}

// A storage on `device` over the memory of `storage`, which lives as long (work that is under way may need it).
c10::Storage over(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  auto* owner = new c10::Storage(storage);
  auto release = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  return {c10::Storage::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(storage.mutable_data(), owner, release, device), allocator, true};
}

c10::Storage borrowed(const c10::Storage& storage) {
  return over(storage, c10::Device(c10::DeviceType::CPU), c10::GetCPUAllocator());
}

c10::Storage adopted(const c10::Storage& storage) { return over(storage, kDevice, &device_allocator); }

struct Borrowed {
  at::Tensor device, host;
};

// Which operations take operands of both devices.
const std::unordered_set<std::string> kMixed = {
    "aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::index.Tensor", "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_", "aten::index", "aten::set_", "aten::_copy_from"};

// Boxed calls ----------------------------------------------------------------------------------------------------------

class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(torch::jit::Stack* stack) {
    const auto& schema = op_.schema();
    const auto count = schema.arguments().size();
    std::vector<c10::IValue> given(stack->end() - count, stack->end());
    for (size_t i = 0; i < count; ++i) (*stack)[stack->size() - count + i] = to_host(given[i]);
    if (on_device_ && host_operand_ && schema.name().rfind("aten::", 0) == 0 && !kMixed.count(schema.name()))
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                         "cpu! (", schema.name(), ")");
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto& each : tensors_) follow(each);
    const auto returned = schema.returns().size();
    for (size_t i = 0; i < returned; ++i) {
      auto& value = (*stack)[stack->size() - returned + i];
      const auto* alias = schema.returns()[i].alias_info();
      bool same = false;
      if (alias && alias->isWrite())
        for (size_t j = 0; j < count && !same; ++j) {
          const auto* of = schema.arguments()[j].alias_info();
          if (of && of->isWrite() && *of == *alias) { value = given[j]; same = true; }
        }
      if (!same) value = to_device(value);
    }
  }

 private:
  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(host(value.toTensor())) : value;
    if (value.isDevice() && value.toDevice().is_cuda()) {
      asks_device_ = on_device_ = true;
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isDevice() && value.toDevice().is_cpu()) asks_host_ = true;
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(each.defined() ? host(each) : each);
      return made;
    }
    if (value.isList() && value.type()->isSubtypeOf(*c10::getTypePtr<std::vector<std::vector<at::Tensor>>>())) {
      c10::List<c10::List<at::Tensor>> made;
      for (const c10::IValue& each : value.toListRef()) made.push_back(to_host(each).toTensorList());
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        made.push_back(each && each->defined() ? std::optional<at::Tensor>(host(*each)) : each);
      return made;
    }
    return value;
  }

  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0 && tensor.device().is_cpu()) host_operand_ = true;
      return tensor;
    }
    on_device_ = true;
    const void* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = hosts_.find(storage);
    if (found == hosts_.end()) found = hosts_.emplace(storage, borrowed(tensor.storage())).first;
    tensors_.push_back({tensor, over(tensor, found->second, c10::DispatchKey::CPU)});
    devices_.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    return tensors_.back().host;
  }

  // What the kernel resized or moved, as out= does.
  static void follow(const Borrowed& pair) {
    auto* device = pair.device.unsafeGetTensorImpl();
    const auto& host = pair.host;
    if (host.storage().data() != pair.device.storage().data() ||
        host.storage().nbytes() != pair.device.storage().nbytes()) {
      auto made = adopted(host.storage());
      device->unsafe_storage().set_data_ptr_noswap(std::move(made.mutable_data_ptr()));
      device->unsafe_storage().unsafeGetStorageImpl()->set_nbytes(host.storage().nbytes());
    }
    if (host.sizes() != pair.device.sizes() || host.strides() != pair.device.strides() ||
        host.storage_offset() != pair.device.storage_offset())
      device->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (asks_host_ && !asks_device_) return value;
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(device(value.toTensor())) : value;
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(each.defined() ? device(each) : each);
      return made;
    }
    return value;
  }

  at::Tensor device(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu()) return tensor;
    const void* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = devices_.find(storage);
    if (found == devices_.end()) found = devices_.emplace(storage, adopted(tensor.storage())).first;
    return over(tensor, found->second, c10::DispatchKey::CUDA);
  }

  const c10::OperatorHandle& op_;
  std::vector<Borrowed> tensors_;
  std::unordered_map<const void*, c10::Storage> hosts_, devices_;
  bool on_device_ = false, host_operand_ = false, asks_device_ = false, asks_host_ = false;
};

void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op).run(stack); }

// What cannot be a call of the host's kernel ---------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cuda() ? over(tensor, borrowed(tensor.storage()), c10::DispatchKey::CPU) : tensor;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  on_host(self).copy_(on_host(source), non_blocking);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "set_: storage on ", storage.device(), ", tensor on ", self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const int64_t count = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("copy_", copy_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
  // These have a kernel for all devices, which asks for one of this device's own.
  for (const char* name : {"resize_", "_local_scalar_dense", "_reshape_alias", "fill_.Scalar", "fill_.Tensor", "zero_",
                           "native_dropout", "_fused_adamw_", "_fused_adam_", "_fused_adamw_.tensor_lr", "masked_scatter_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

// Collectives go over the host's backend (gloo), whatever NCCL would do differently.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
                           "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
                           "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_",
                           "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

TORCH_LIBRARY(pretended_gpu, m) {
  m.def("host(Tensor tensor) -> Tensor", on_host);  // the memory of a tensor, as a tensor of the host
}

// DistributedDataParallel measures with a timer of the device's own.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

struct Allocators {
  Allocators() { c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator); }
} allocators;

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}

namespace c10::impl {
namespace {
// Work is done when it is asked for: there is one stream, and events have happened.
struct Guard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
}  // namespace c10::impl

extern "C" void pretended_gpu_resize(c10::StorageImpl* storage, size_t bytes) {
  auto memory = device_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}
