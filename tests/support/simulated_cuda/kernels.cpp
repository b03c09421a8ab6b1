// Kernels: those of the CPU, over the same memory, and what a device has of its own: copies, dropout, batch norm.
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cmath>
#include <set>

namespace simulated {

namespace {

constexpr double LAUNCH = 2e-6; // seconds of the device's time for an op
constexpr double MEMORY = 3e12, LINK = 5e10; // bytes in a second, of the device's memory and between it and the host

struct Span {
  const char* at;
  size_t bytes;
};
Span span_of(const Tensor& t) {
  if (!t.numel()) {
    return {nullptr, 0};
  }
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) {
    last += (t.size(i) - 1) * t.stride(i);
  }
  const auto* base = static_cast<const char*>(t.storage().data());
  return {base + t.storage_offset() * t.element_size(), size_t(last + 1) * t.element_size()};
}

Tensor within(const c10::Storage& storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    made._set_conj(true);
  }
  if (like.is_neg()) {
    made._set_neg(true);
  }
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

// A storage's bytes in memory of the device.
c10::Storage moved(const c10::Storage& from, int device) {
  c10::Storage to(c10::Storage::use_byte_size_t(), from.nbytes(), allocator_of(device), true);
  if (from.nbytes()) {
    memcpy(to.mutable_data(), from.data(), from.nbytes());
  }
  return to;
}

bool writes(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias) {
    return false;
  }
  return alias->isWrite() ||
      std::any_of(alias->containedTypes().begin(), alias->containedTypes().end(), [](auto& a) { return a.isWrite(); });
}

// A fused optimizer writes to gradients if it is to unscale them, whatever its schema says.
bool only_reads(const c10::Argument& argument, c10::ArrayRef<c10::Argument> all, const torch::jit::Stack& stack) {
  for (size_t i = 0; argument.name() == "grads" && i < all.size(); i++) {
    if (all[i].name() == "grad_scale") {
      return stack[stack.size() - all.size() + i].isNone();
    }
  }
  return false;
}

// Tensors of the CPU may be among those of a device where a kernel reads them on the host.
bool takes_tensors_of_both(const std::string& name) {
  return name.find("index") != std::string::npos || name.find("ctc") != std::string::npos ||
      name.find("_foreach") != std::string::npos;
}

template <typename F>
void each_tensor(const c10::IValue& value, F&& look) {
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) {
      look(t);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector()) {
      if (t) {
        look(*t);
      }
    }
  }
}

template <typename F>
c10::IValue mapped(const c10::IValue& value, F&& to) {
  if (value.isTensor()) {
    return to(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) {
      list.push_back(to(t));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) {
      list.push_back(t ? std::optional<Tensor>(to(*t)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// The default generator of the CPU draws what a device's would, for a block.
struct DrawsOnCpu {
  explicit DrawsOnCpu(const Draws& draws)
      : generator(at::detail::getDefaultCPUGenerator()), before(generator.get_state()) {
    generator.set_current_seed(mixed(mixed(draws.seed) ^ draws.offset));
  }
  ~DrawsOnCpu() {
    generator.set_state(before);
  }
  at::Generator generator;
  Tensor before;
};

} // namespace

Tensor Aliases::on_cpu(const Tensor& t) {
  if (!t.defined() || !is_ours(t.device())) {
    return t;
  }
  for (auto& [cpu, own] : pairs) {
    if (own.is_same(t)) {
      return cpu;
    }
  }
  const c10::Storage& storage = t.storage();
  auto known = std::find_if(storages.begin(), storages.end(), [&](auto& pair) {
    return pair.second.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  if (known == storages.end()) {
    void* data = const_cast<void*>(storage.data());
    c10::Storage cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::Device(c10::kCPU)),
                     c10::GetAllocator(c10::kCPU), true);
    storages.emplace_back(std::move(cpu), storage);
    known = std::prev(storages.end());
  }
  Tensor cpu = within(known->first, c10::DispatchKey::CPU, t);
  pairs.emplace_back(cpu, t);
  return cpu;
}

Tensor Aliases::on_device(const Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || !t.has_storage()) {
    return t;
  }
  for (auto& [cpu, own] : pairs) {
    if (cpu.is_same(t)) {
      return own;
    }
  }
  const c10::Storage& storage = t.storage();
  auto known = std::find_if(storages.begin(), storages.end(), [&](auto& pair) {
    return pair.first.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  if (known == storages.end()) {
    storages.emplace_back(storage, moved(storage, device));
    known = std::prev(storages.end());
    access(stream, known->second.data(), known->second.nbytes(), true, name);
  }
  Tensor own = within(known->second, KEY, t);
  pairs.emplace_back(t, own); // a result that is returned twice is one tensor
  return own;
}

void Aliases::take_over_sizes() {
  for (auto& [cpu, own] : pairs) {
    if (cpu.storage().nbytes() != own.storage().nbytes()) {
      c10::Storage larger = moved(cpu.storage(), device);
      auto* impl = own.storage().unsafeGetStorageImpl();
      impl->set_nbytes(larger.nbytes());
      impl->set_data_ptr_noswap(larger.set_data_ptr(c10::DataPtr(nullptr, larger.device())));
      access(stream, own.storage().data(), own.storage().nbytes(), true, name);
    }
    if (cpu.sizes() != own.sizes() || cpu.strides() != own.strides()) {
      own.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
}

Launch::Launch(std::string name, int device, double bytes)
    : name(std::move(name)), device(device), stream(current_stream(device)) {
  catch_up(stream);
  begin(stream, LAUNCH + bytes / MEMORY);
}
void Launch::reads(const Tensor& t) const {
  if (t.defined() && is_ours(t.device())) {
    auto [at, bytes] = span_of(t);
    access(stream, at, bytes, false, name);
  }
}
void Launch::writes(const Tensor& t) const {
  if (t.defined() && is_ours(t.device())) {
    auto [at, bytes] = span_of(t);
    access(stream, at, bytes, true, name);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const std::string& name = schema.name();
  size_t first = stack->size() - arguments.size();
  int device = -1;
  double bytes = 0;
  int64_t elements = 0;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& value = (*stack)[first + i];
    each_tensor(value, [&](const Tensor& t) {
      if (!t.defined() || !is_ours(t.device())) {
        return;
      }
      TORCH_CHECK(
          device < 0 || device == t.get_device(),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
          " and cuda:", int(t.get_device()), "! (", name, ")");
      device = t.get_device();
      bytes += double(t.numel()) * t.element_size();
      elements = std::max(elements, t.numel());
    });
    if (value.isDevice() && is_ours(value.toDevice()) && device < 0) {
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    }
  }
  device = device < 0 ? current_device() : device;
  OnDevice current(device);
  Launch launch(name, device, bytes);
#ifndef SIMULATED_PRIVATEUSE1
  std::vector<c10::IValue> given(stack->begin() + static_cast<int64_t>(first), stack->end());
  take_workspaces(launch, given);
  auto other_kernel = by_another_kernel(launch, given); // with its workspace
#else
  std::optional<c10::DataPtr> other_kernel;
#endif
  std::optional<at::ScalarType> rounded; // from double
  Aliases aliases(launch);
  std::optional<Draws> draws;
  bool takes_generator = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = (*stack)[first + i];
    bool is_written = writes(arguments[i]) && !only_reads(arguments[i], arguments, *stack);
    each_tensor(value, [&](const Tensor& t) {
      TORCH_CHECK(
          !t.defined() || !t.device().is_cpu() || t.dim() == 0 || takes_tensors_of_both(name),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and cpu! (",
          name, ")");
      is_written ? launch.writes(t) : launch.reads(t);
    });
    if (value.isGenerator() || (value.isNone() && arguments[i].name() == "generator")) {
      auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
      draws = take_draws(given, device, elements);
      value = at::detail::createCPUGenerator(mixed(mixed(draws->seed) ^ draws->offset));
      takes_generator = true;
    } else if (value.isDevice() && is_ours(value.toDevice())) {
      value = c10::Device(c10::kCPU);
    } else {
      value = mapped(value, [&](const Tensor& t) { return aliases.on_cpu(t); });
      if (other_kernel && value.isTensor() && value.toTensor().defined()) {
        rounded = value.toTensor().scalar_type();
        value = value.toTensor().to(at::kDouble);
      }
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<DrawsOnCpu> drawing;
    if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
      drawing.emplace(take_draws(std::nullopt, device, elements));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  size_t count = schema.returns().size(), from = stack->size() - count;
  aliases.take_over_sizes();
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[from + i];
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      value = mapped(value, [&](const Tensor& t) {
        return aliases.on_device(rounded && t.defined() ? t.to(*rounded) : t);
      });
    } else if (!value.isNone()) {
      synchronize(launch.stream); // a number that the host is told
    }
  }
}

namespace {

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  int index = device && device->has_index() ? device->index() : current_device();
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator_of(index), c10::DispatchKeySet(KEY),
      c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  int index = device && device->has_index() ? device->index() : current_device();
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator_of(index),
      c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype));
}

// Between devices, and between one and the host. Bytes on a side stream are copied as late as they may, by their
// addresses alone: nothing keeps the memory, as on a device.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel() && !from.numel()) {
    return to;
  }
  int device = is_ours(from.device()) ? from.get_device() : to.get_device();
  int stream = current_stream(device);
  bool with_host = !is_ours(from.device()) || !is_ours(to.device());
  const Tensor& host = is_ours(from.device()) ? to : from;
  bool pinned = with_host && is_pinned(span_of(host).at);
  bool between = !with_host && from.get_device() != to.get_device();
  if (between) {
    wait(stream, record(current_stream(to.get_device())));
  }
  begin(stream, LAUNCH + double(to.nbytes()) / (with_host ? LINK : MEMORY));
  auto use = [&](const Tensor& t, bool writes) {
    if (is_ours(t.device()) || pinned) {
      auto [at, bytes] = span_of(t);
      access(stream, at, bytes, writes, "copy_");
    }
  };
  use(from, false);
  use(to, true);
  Launch launch("copy_", device, 0);
  bool late = false;
  if (from.dtype() == to.dtype() && from.sizes() == to.sizes() && from.is_contiguous() && to.is_contiguous() &&
      from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg()) {
    late = !between && (!with_host || (pinned && non_blocking));
  }
  if (late) {
    void* target = const_cast<char*>(span_of(to).at);
    give(stream, [target, source = span_of(from).at, bytes = to.nbytes()] { memcpy(target, source, bytes); });
  } else {
    catch_up(stream);
    at::AutoDispatchBelowADInplaceOrView below;
    Aliases aliases(launch);
    Tensor target = aliases.on_cpu(to);
    target.copy_(aliases.on_cpu(from));
  }
  if (between) {
    wait(current_stream(to.get_device()), record(stream));
  }
  if (with_host && (!non_blocking || (!pinned && is_ours(from.device())))) {
    synchronize(stream);
  }
  return to;
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

Tensor& set_storage(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.empty() && !sizes.empty()) {
    strides.assign(sizes.size(), 1);
    for (size_t i = sizes.size() - 1; i-- > 0;) {
      strides[i] = strides[i + 1] * std::max<int64_t>(1, sizes[i + 1]);
    }
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}
Tensor& set_source(Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  return self;
}
Tensor& set_empty(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator_of(self.get_device()), true);
  return set_storage(self, std::move(none), 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}
void record_tensor(Tensor& self, c10::Stream stream) {
  record_stream(const_cast<void*>(self.storage().data()), number_of(stream.device_index(), stream.id()));
}

// One kernel that draws, scales and keeps the mask. The scale is that of CUDA's: of a float for all but double.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  }
  OnDevice current(x.get_device());
  Launch launch("native_dropout", x.get_device(), 2.25 * double(x.nbytes()));
  launch.reads(x);
  Draws draws = take_draws(std::nullopt, x.get_device(), x.numel());
  double keep = 1 - p;
  Tensor mask = at::empty(x.sizes(), at::TensorOptions().dtype(at::kBool));
  bool* bits = mask.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < x.numel(); i++) {
    bits[i] = uniform(draws, i) < keep;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases aliases(launch);
  Tensor cpu = aliases.on_cpu(x);
  double scale = keep == 0 ? 0 : x.scalar_type() == at::kDouble ? 1 / keep : double(1 / float(keep));
  Tensor y = at::empty_like(cpu).copy_(cpu).mul_(mask).mul_(scale);
  return {aliases.on_device(y), aliases.on_device(at::empty_like(cpu, cpu.options().dtype(at::kBool)).copy_(mask))};
}
Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  OnDevice current(grad.get_device());
  Launch launch("native_dropout_backward", grad.get_device(), 2.25 * double(grad.nbytes()));
  launch.reads(grad);
  launch.reads(mask);
  at::AutoDispatchBelowADInplaceOrView below;
  Aliases aliases(launch);
  Tensor cpu = aliases.on_cpu(grad);
  return aliases.on_device(cpu.mul(aliases.on_cpu(mask)).mul_(scale));
}

// What cuDNN keeps of a forward: here its bytes are known, and a backward that is handed others is refused.
constexpr int RESERVED = 7;

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
    const std::optional<Tensor>& var, bool training, double momentum, double eps) {
  OnDevice current(x.get_device());
  Launch launch("cudnn_batch_norm", x.get_device(), 3 * double(x.nbytes()));
  Aliases aliases(launch);
  launch.reads(x);
  auto on_cpu = [&](const std::optional<Tensor>& t, bool written) {
    if (!t || !t->defined()) {
      return std::optional<Tensor>();
    }
    written ? launch.writes(*t) : launch.reads(*t);
    return std::optional<Tensor>(aliases.on_cpu(*t));
  };
  at::AutoDispatchBelowADInplaceOrView below;
  auto [y, saved, rstd] = at::native_batch_norm(
      aliases.on_cpu(x), on_cpu(weight, false), on_cpu(bias, false), on_cpu(mean, training), on_cpu(var, training),
      training, momentum, eps);
  Tensor reserve = at::full({training ? reserve_bytes(x.numel()) : 0}, RESERVED, at::TensorOptions().dtype(at::kByte));
  Tensor result = aliases.on_device(y); // in the order of a device
  Tensor kept_mean = aliases.on_device(saved), kept_rstd = aliases.on_device(rstd);
  return {result, kept_mean, kept_rstd, aliases.on_device(reserve)};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& x, const Tensor& grad, const Tensor& weight, const std::optional<Tensor>&,
    const std::optional<Tensor>&, const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, double eps,
    const Tensor& reserve) {
  OnDevice current(x.get_device());
  Launch launch("cudnn_batch_norm_backward", x.get_device(), 4 * double(x.nbytes()));
  Aliases aliases(launch);
  for (const Tensor& t : {x, grad, weight, *mean, *rstd}) {
    launch.reads(t);
  }
  launch.writes(reserve); // cuDNN may
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor kept = aliases.on_cpu(reserve);
  TORCH_CHECK(
      kept.numel() == reserve_bytes(x.numel()) && kept.eq(RESERVED).all().item<bool>(),
      "cuDNN error (simulated): a backward is handed another reserve than its forward's");
  kept.zero_();
  auto [dx, dw, db] = at::native_batch_norm_backward(
      aliases.on_cpu(grad), aliases.on_cpu(x), aliases.on_cpu(weight), {}, {}, aliases.on_cpu(*mean),
      aliases.on_cpu(*rstd), true, eps, {true, true, true});
  Tensor result = aliases.on_device(dx), result_w = aliases.on_device(dw);
  return {result, result_w, aliases.on_device(db)};
}

Tensor as_strided(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
const Tensor& resize_(const Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, size, format);
}

// Every op that the CPU or CUDA has a kernel for gets that of the CPU. So a PyTorch that is built for CUDA, whose
// kernels need a driver, and one for the CPU are the same device here.
const std::set<std::string> OWN = {
    "empty.memory_format", "empty_strided", "copy_", "_copy_from", "as_strided", "view", "_reshape_alias", "resize_",
    "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_", "record_stream",
    "native_dropout", "native_dropout_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"};

struct Silent final : c10::WarningHandler { // of each kernel that another takes the place of
  void process(const c10::Warning&) override {}
};

int register_kernels() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto fallback = [] { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); };
  static torch::Library everything(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  everything.fallback(fallback());
  static torch::Library aten(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  std::set<std::string> taken = OWN;
#ifndef SIMULATED_PRIVATEUSE1
  std::set<std::string> attention = register_attention(aten);
  taken.insert(attention.begin(), attention.end());
#endif
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != std::optional<c10::string_view>("aten") || !op || !op->hasSchema()) {
      continue;
    }
    std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    bool has_kernel =
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op->hasKernelForDispatchKey(KEY);
    // a convolution would choose cuDNN's, of which there is none
    bool chooses = own == "convolution" || own == "convolution_backward" || own == "convolution_overrideable";
    if ((has_kernel || chooses) && !taken.count(own)) {
      aten.impl(own.c_str(), fallback());
    }
  }
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("copy_", &copy_);
  aten.impl("_copy_from", &copy_from);
  aten.impl("as_strided", &as_strided);
  aten.impl("view", [](const Tensor& t, at::IntArrayRef size) { return at::native::view(t, size); });
  aten.impl("_reshape_alias", [](const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(t, size, stride);
  });
  aten.impl("resize_", &resize_);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Storage", &set_source);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_", &set_empty);
  aten.impl("record_stream", &record_tensor);
  aten.impl("native_dropout", &native_dropout);
  aten.impl("native_dropout_backward", &native_dropout_backward);
  aten.impl("cudnn_batch_norm", &cudnn_batch_norm);
  aten.impl("cudnn_batch_norm_backward", &cudnn_batch_norm_backward);
  return 0;
}
const int registered = register_kernels();

} // namespace

} // namespace simulated
