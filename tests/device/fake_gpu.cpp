// A device for tests on machines without a GPU, of torch's type PrivateUse1 ("gpu").
//
// It computes with the kernels of the CPU, so results have the bits of a run on the CPU. In what
// torch demands of a program it behaves like CUDA:
// - An operation on a tensor of the device and one of the CPU is refused (but for scalars, and
//   tensors of indices). So is memory of another device than the rank's own, once it has one.
// - Random numbers come from a generator of its own.
// - A copy to pinned memory that the host does not wait for (`non_blocking`) arrives when the host
//   waits for the device, and not before; until then the memory holds other values.
// - Memory has a limit, if `limit_memory` sets one, beyond which an allocation is refused.
// - `waits` counts what makes the host wait for the device; `operations` what it starts on it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <malloc.h>

#include <chrono>
#include <mutex>
#include <unordered_set>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using Sizes = at::IntArrayRef;

constexpr DeviceType kGpu = DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr double kNotArrived = 113;  // what memory holds before a copy has arrived

int device_count = 2;
DeviceIndex own_device = -1;  // of this process, once it has chosen one
thread_local DeviceIndex current = 0;
thread_local bool in_kernel = false;  // copies made by an operation on the CPU are not counted
std::atomic<int64_t> operations = 0;
std::atomic<int64_t> waits = 0;

void count(std::atomic<int64_t>& number) {
  if (!in_kernel) ++number;
}

// ---- Memory ----

int64_t memory_limit = -1;  // in bytes; -1: none
std::atomic<int64_t> memory_used = 0;

void free_memory(void* memory) {
  memory_used -= malloc_usable_size(memory);
  std::free(memory);
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(own_device < 0 || current == own_device, "memory of device gpu:", int(current),
                " asked for by the rank whose device is gpu:", int(own_device));
    TORCH_CHECK_WITH(OutOfMemoryError,
                     memory_limit < 0 || memory_used + int64_t(bytes) <= memory_limit,
                     "gpu out of memory. Tried to allocate ", bytes, " bytes, of ", memory_limit,
                     " in use: ", memory_used.load());
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    memory_used += malloc_usable_size(memory);
    return {memory, memory, &free_memory, Device(kGpu, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} allocator;

std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

void free_pinned(void* memory) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(memory);
  std::free(memory);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_allocator;

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.count(memory) > 0;
}

// The same memory as a tensor on the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

struct Copy {
  at::Tensor values;
  at::Tensor to;
};
std::mutex copies_lock;
std::vector<Copy> copies;  // that have not arrived yet

void wait_for_copies() {
  std::vector<Copy> arriving;
  {
    std::lock_guard<std::mutex> guard(copies_lock);
    arriving.swap(copies);
  }
  for (auto& it : arriving) it.to.copy_(it.values);
}

// ---- Streams, events, generators ----

using Time = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kGpu;
  DeviceType type() const override { return kGpu; }
  Device exchangeDevice(Device next) const override {
    const Device before = getDevice();
    current = next.index();
    return before;
  }
  Device getDevice() const override { return Device(kGpu, current); }
  void setDevice(Device next) const override { current = next.index(); }
  void uncheckedSetDevice(Device next) const noexcept override { current = next.index(); }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait(); }
  void synchronizeDevice(const DeviceIndex) const override { wait(); }
  void record(void** event, const c10::Stream&, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Time;
    *static_cast<Time*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait_for_copies(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Time*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> between =
        *static_cast<Time*>(second) - *static_cast<Time*>(first);
    return between.count();
  }
  static void wait() {
    count(waits);
    wait_for_copies();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const at::Generator& generator() {
  static const at::Generator own = at::make_generator<at::CPUGeneratorImpl>();
  return own;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    at::DataPtr data = allocator.allocate(bytes);
    if (impl->nbytes() && bytes) {
      std::memcpy(data.get(), impl->data(), std::min(impl->nbytes(), bytes));
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
} hooks;

// Lets an operation on the CPU draw its random numbers from the device's generator.
struct DeviceRandom {
  explicit DeviceRandom(bool draws) : draws(draws) {
    if (!draws) return;
    before = at::detail::getDefaultCPUGenerator().get_state();
    set(generator().get_state());
  }
  ~DeviceRandom() {
    if (!draws) return;
    at::Generator own = generator();
    own.set_state(at::detail::getDefaultCPUGenerator().get_state());
    set(before);
  }
  static void set(const at::Tensor& state) {
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    cpu.set_state(state);
  }
  bool draws;
  at::Tensor before;
};

struct InKernel {
  InKernel() : before(in_kernel) { in_kernel = true; }
  ~InKernel() { in_kernel = before; }
  bool before;
};

// ---- Operations that the device must have of its own ----

at::Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device,
                         std::optional<bool>) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  count(operations);
  const bool leaves = !to.device().is_privateuseone(), enters = !from.device().is_privateuseone();
  const at::Tensor& host = leaves ? to : from;
  if (!leaves && !enters) {
    on_cpu(to).copy_(on_cpu(from));
  } else if (non_blocking && is_pinned(host.storage().data())) {
    if (enters) {
      on_cpu(to).copy_(from);
    } else {
      at::Tensor values = on_cpu(from).clone();
      to.fill_(kNotArrived);
      std::lock_guard<std::mutex> guard(copies_lock);
      copies.push_back({values, to});
    }
  } else {
    if (from.numel()) count(waits);
    on_cpu(to).copy_(on_cpu(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, Sizes size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Scalar item(const at::Tensor& self) {
  count(waits);
  return on_cpu(self).item();
}

at::Tensor view(const at::Tensor& self, Sizes size) { return at::native::view(self, size); }

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, Sizes size,
                               Sizes stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

// torch refuses convolutions for a device of this type before they reach the fallback.
at::Tensor on_gpu(const at::Tensor& tensor, Device device) {
  return tensor.defined() ? tensor.to(device) : tensor;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, Sizes stride, Sizes padding,
                       Sizes dilation, bool transposed, Sizes output_padding, int64_t groups) {
  const bool has_bias = bias && bias->defined();
  TORCH_CHECK(input.device() == weight.device() &&
                  (!has_bias || bias->device() == weight.device()),
              "Expected all tensors to be on the same device: convolution");
  count(operations);
  const InKernel kernel;
  std::optional<at::Tensor> own;
  if (has_bias) own = on_cpu(*bias);
  return on_gpu(at::convolution(on_cpu(input), on_cpu(weight), own, stride, padding, dilation,
                                transposed, output_padding, groups),
                input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, Sizes stride,
    Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  TORCH_CHECK(input.device() == weight.device() && grad.device() == weight.device(),
              "Expected all tensors to be on the same device: convolution_backward");
  count(operations);
  const InKernel kernel;
  const auto outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const auto found =
      at::convolution_backward(on_cpu(grad), on_cpu(input), on_cpu(weight), {{outputs}}, stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  const auto device = input.device();
  return {on_gpu(std::get<0>(found), device), on_gpu(std::get<1>(found), device),
          on_gpu(std::get<2>(found), device)};
}

// The fallback would drop the new running statistics: the schema does not call them changed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& variance, bool training, double momentum, double epsilon) {
  std::array<std::optional<at::Tensor>, 4> others = {weight, bias, mean, variance};
  for (auto& it : others) {
    if (!it || !it->defined()) continue;
    TORCH_CHECK(it->device() == input.device(),
                "Expected all tensors to be on the same device: batch_norm");
    it = on_cpu(*it);
  }
  count(operations);
  const InKernel kernel;
  const auto found = at::native_batch_norm(on_cpu(input), others[0], others[1], others[2],
                                           others[3], training, momentum, epsilon);
  const auto device = input.device();
  return {on_gpu(std::get<0>(found), device), on_gpu(std::get<1>(found), device),
          on_gpu(std::get<2>(found), device)};
}

int64_t attention_kernel(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                         bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// ---- All other operations: on the CPU, if their tensors are where CUDA would take them ----

// These take tensors of indices from the CPU on CUDA too.
const std::unordered_set<std::string> kMixing = {"aten::index", "aten::index_put_",
                                                 "aten::_index_put_impl_"};

// Raises as CUDA does if some tensors are of the device, and others of the CPU.
void refuse_mixed(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool on_device = false;
  std::string elsewhere;
  const auto& schema = op.schema();
  auto look = [&](const std::string& name, const at::Tensor& it) {
    if (!it.defined()) return;
    if (it.device().is_privateuseone()) {
      on_device = true;
    } else if (it.dim() > 0 && elsewhere.empty()) {
      elsewhere = c10::str(name, " of shape ", it.sizes(), " on ", it.device());
    }
  };
  const auto values = torch::jit::last(stack, schema.arguments().size());
  for (size_t place = 0; place < values.size(); ++place) {
    const std::string& name = schema.arguments()[place].name();
    const auto& value = values[place];
    if (value.isTensor()) look(name, value.toTensor());
    if (value.isTensorList()) {
      for (const auto& it : value.toTensorVector()) look(name, it);
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& it : value.toOptionalTensorVector()) {
        if (it) look(name, *it);
      }
    }
  }
  TORCH_CHECK(!on_device || elsewhere.empty() || kMixing.count(schema.name()),
              "Expected all tensors to be on the same device, but ", schema.name(),
              " has the argument ", elsewhere);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_mixed(op, *stack);
  count(operations);
  const InKernel kernel;
  const DeviceRandom random(op.hasTag(at::Tag::nondeterministic_seeded));
  at::native::cpu_fallback(op, stack);
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kernel);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("_fused_sdp_choice", &attention_kernel);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(kGpu, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_device", [](int index) { current = static_cast<DeviceIndex>(index); });
  m.def("keep_to", [](int index) { own_device = static_cast<DeviceIndex>(index); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device_count", [](int number) { device_count = number; });
  m.def("device_count", [] { return device_count; });
  m.def("limit_memory", [](int64_t bytes) { memory_limit = bytes; });
  m.def("memory_used", [] { return memory_used.load(); });
  m.def("synchronize", &Guard::wait);
  m.def("seed", [](uint64_t seed) {
    at::Generator own = generator();
    own.set_current_seed(seed);
  });
  m.def("rng_state", [] { return generator().get_state(); });
  m.def("set_rng_state", [](const at::Tensor& state) {
    at::Generator own = generator();
    own.set_state(state);
  });
  m.def("counts", [] { return std::make_pair(operations.load(), waits.load()); });
}
