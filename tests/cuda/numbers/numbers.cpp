// Numbers for torch's operators under the stand-in: each CUDA kernel of `aten` runs as it is (allocations, launches, checks),
// and then the CPU's kernel is queued on the same stream, on the same memory. So results are those of a CPU, bit for bit,
// and work that is not waited for shows as other numbers.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "specials.hpp"

namespace standin {
namespace {

using torch::jit::Stack;

struct Kernel {
  c10::SafeKernelFunction original;
  Special special = nullptr;  // where the CPU has no operator of this name
  bool computable = false;
  bool on_host = false;  // the size of the result depends on numbers, or the result is a number: waits for the device
};
std::unordered_map<c10::OperatorName, Kernel>& kernels() {
  static auto& all = *new std::unordered_map<c10::OperatorName, Kernel>;
  return all;
}
std::mutex missing_mutex;
std::set<std::string> missing;

thread_local bool inside = false;  // of another operator's kernel
struct Inside {
  bool before = std::exchange(inside, true);
  ~Inside() { inside = before; }
};

// Operators whose kernels for all devices call kernels that a CPU has not: theirs are replaced as well.
const std::set<std::string> kWhole{"aten::convolution", "aten::convolution_backward", "aten::copy_"};
const std::set<std::string> kOnHost{"aten::nonzero",    "aten::masked_select",      "aten::_unique2",
                                    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                                    "aten::equal"};
const std::set<std::string> kNothingToDo{
    "aten::empty",         "aten::empty_strided",        "aten::resize_", "aten::set_", "aten::_local_scalar_dense",
    "aten::record_stream", "aten::_copy_from_and_resize"};

// The same memory as a tensor of the CPU.
at::Tensor alias_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}
c10::IValue alias(const c10::IValue& value) {
  if (value.isTensor()) return alias_of(value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(alias_of(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      all.push_back(tensor.has_value() ? std::optional(alias_of(*tensor)) : std::nullopt);
    return all;
  }
  return value;
}

void move_into(const c10::IValue& result, const c10::IValue& to) {
  if (to.isTensor()) {
    const at::Tensor& out = to.toTensor();
    if (out.defined() && out.numel() > 0 && result.toTensor().data_ptr() != out.data_ptr()) out.copy_(result.toTensor());
  } else if (to.isTensorList()) {
    const auto outs = to.toTensorVector(), results = result.toTensorVector();
    for (size_t i = 0; i < outs.size(); ++i) move_into(results[i], outs[i]);
  }
}

// Where the draws of an operator begin: what its kernel would be told.
struct Draws {
  at::PhiloxCudaState state;
  std::uint64_t seed() const { return state.captured_ ? static_cast<std::uint64_t>(*state.seed_.ptr) : state.seed_.val; }
  std::uint64_t offset() const {
    return state.captured_ ? static_cast<std::uint64_t>(*state.offset_.ptr) + state.offset_intragraph_ : state.offset_.val;
  }
};
std::unique_ptr<Draws> draws_of(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& tags = op.getTags();
  if (std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) == tags.end()) return nullptr;
  std::optional<at::Generator> given;
  for (const c10::IValue& argument : arguments)
    if (argument.isGenerator() && argument.toGenerator().device().is_cuda()) given = argument.toGenerator();
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard lock(generator->mutex_);
  return std::make_unique<Draws>(Draws{generator->philox_cuda_state(0)});
}

// A CPU's generator in place of the device's, and of the default one for operators that take none.
class Seeded {
 public:
  Seeded(const Draws& draws, Stack& arguments) {
    const std::uint64_t seed = draws.seed() * 0x9E3779B97F4A7C15ULL + draws.offset();
    for (c10::IValue& argument : arguments)
      if (argument.isGenerator()) argument = at::detail::createCPUGenerator(seed);
    default_ = at::detail::getDefaultCPUGenerator();
    before_ = default_.clone();
    default_.set_current_seed(seed);
  }
  ~Seeded() { default_.set_state(before_.get_state()); }

 private:
  at::Generator default_, before_;
};

Stack compute(const c10::OperatorHandle& op, const Kernel& kernel, Stack arguments, const Draws* draws) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch}));
  std::unique_ptr<Seeded> seeded = draws != nullptr ? std::make_unique<Seeded>(*draws, arguments) : nullptr;
  if (kernel.special != nullptr) return kernel.special(arguments, draws != nullptr ? draws->seed() + draws->offset() : 0);
  op.callBoxed(arguments);
  return arguments;
}

bool copies_between_devices(const c10::OperatorHandle& op, const Stack& arguments) {
  return op.schema().name() == "aten::copy_" && arguments[0].toTensor().device() != arguments[1].toTensor().device();
}

void run_on_host(const c10::OperatorHandle& op, const Kernel& kernel, Stack arguments, Stack& stack) {
  at::Device device(at::kCUDA, c10::cuda::current_device());
  c10::cuda::getCurrentCUDAStream().synchronize();
  for (c10::IValue& argument : arguments) argument = alias(argument);
  for (c10::IValue& result : compute(op, kernel, std::move(arguments), nullptr))
    stack.push_back(result.isTensor() ? c10::IValue(result.toTensor().to(device)) : result);
}

// In place of every CUDA kernel.
void kernel_with_numbers(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Kernel& kernel = kernels().at(op.operator_name());
  const size_t num_arguments = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  if (inside || copies_between_devices(op, arguments)) return kernel.original.callBoxed(op, keys, stack);
  if (kernel.on_host) {
    stack->resize(stack->size() - num_arguments);
    return run_on_host(op, kernel, std::move(arguments), *stack);
  }
  if (!kernel.computable) {
    const std::lock_guard lock(missing_mutex);
    missing.insert(c10::toString(op.operator_name()));
  }
  std::shared_ptr<Draws> draws = draws_of(op, arguments);
  {
    const Inside one;
    kernel.original.callBoxed(op, keys, stack);
  }
  if (!kernel.computable) return;
  Stack results(stack->end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()), stack->end());
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  for (c10::IValue& value : arguments) value = alias(value);
  for (c10::IValue& value : results) value = alias(value);
  struct Call {
    c10::OperatorHandle op;
    const Kernel& kernel;
    Stack arguments, results;
    std::shared_ptr<Draws> draws;
  };
  // Kept for good: a graph may run it again.
  auto* call = new Call{op, kernel, std::move(arguments), std::move(results), std::move(draws)};
  const auto run = [](void* data) {
    const Call& call = *static_cast<Call*>(data);
    const Stack made = compute(call.op, call.kernel, call.arguments, call.draws.get());
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    for (size_t i = 0; i < made.size(); ++i) move_into(made[i], call.results[i]);
  };
  C10_CUDA_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream(), run, call));
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) { return result.alias_info() != nullptr && !result.alias_info()->isWrite(); });
}

}  // namespace
}  // namespace standin

using namespace standin;

// Gives numbers to all operators from now on.
extern "C" __attribute__((visibility("default"))) void standin_numbers_install() {
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::") || kNothingToDo.contains(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    const bool whole = kWhole.contains(name.name), on_host = kOnHost.contains(name.name);
    if (!op.has_value() || is_view(op->schema()) || !(whole || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))) continue;
    const Special special = special_of(c10::toString(name));
    const bool computable = special != nullptr || op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                            op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    kernels().emplace(name, Kernel{op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), special, computable, on_host});
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel_with_numbers>());
  }
}

// Operators that were called and have no numbers, separated by spaces.
extern "C" __attribute__((visibility("default"))) const char* standin_numbers_missing() {
  static std::string text;
  const std::lock_guard lock(missing_mutex);
  text.clear();
  for (const std::string& name : missing) text += name + " ";
  return text.c_str();
}
