// What libraries keep on the device, and choose.
//
// Workspaces of cuBLAS and cuBLASLt, by handle and stream. A thread has a handle of its own, which the next thread takes
// over once this one ends; workspaces stay.
//
// Kernels of cuDNN for convolutions, by thread. With `torch.backends.cudnn.benchmark` a thread tries them out when it
// first meets a convolution, in workspaces as large as there is room, and keeps the fastest: here another one than the
// thread before it, whose sums are rounded otherwise and which takes a workspace. Where a test asks for it, kernels take
// turns from call to call.
#include "kernels.h"

#include <ATen/Context.h>

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace simulated {

namespace {

constexpr size_t CUBLAS = 32 << 20, CUBLAS_LT = 1 << 20; // bytes, as PyTorch gives them on an H100

const std::set<std::string> PRODUCTS = {
    "aten::mm", "aten::bmm", "aten::addbmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::vdot"};

struct Kept {
  std::mutex lock;
  int made = 0;
  std::vector<int> unused; // handles of threads that ended
  std::map<std::tuple<int, int, size_t>, c10::DataPtr> workspaces; // by handle, stream and bytes
};
Kept& kept() {
  static auto* all = new Kept; // for good: a thread may end after all else
  return *all;
}

struct Handle {
  int number;
  Handle() {
    std::lock_guard guard(kept().lock);
    auto& unused = kept().unused;
    number = unused.empty() ? kept().made++ : unused.back();
    if (!unused.empty()) {
      unused.pop_back();
    }
  }
  ~Handle() {
    std::lock_guard guard(kept().lock);
    kept().unused.push_back(number);
  }
};

constexpr int64_t ROOM = 16; // times the bytes of a convolution's tensors, to try kernels in

bool waver = false;
std::atomic<int> calls = 0;

bool is_there(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

std::string in_words(const c10::IValue& value) {
  std::ostringstream words;
  if (is_there(value)) {
    const Tensor& t = value.toTensor();
    words << t.scalar_type() << t.sizes() << t.strides() << int(t.get_device());
  } else if (!value.isTensor() && !value.isNone()) {
    words << value;
  }
  return words.str();
}

// Whether this thread's kernel for a convolution is the other one.
bool chosen(const std::string& convolution, int64_t bytes) {
  static auto* searched = new std::map<std::string, int>; // how many threads have
  thread_local std::map<std::string, bool> choices;
  auto found = choices.find(convolution);
  if (found == choices.end()) {
    current_allocator()->allocate(ROOM * bytes);
    std::lock_guard guard(kept().lock);
    found = choices.emplace(convolution, (*searched)[convolution]++ % 2).first;
  }
  return found->second;
}

void keep(int stream, size_t bytes) {
  thread_local Handle handle;
  std::lock_guard guard(kept().lock);
  auto& workspace = kept().workspaces[{handle.number, stream, bytes}];
  if (!workspace) {
    workspace = current_allocator()->allocate(bytes);
  }
}

} // namespace

void take_workspaces(const Launch& launch, const std::vector<c10::IValue>& arguments) {
  if (launch.name == "aten::addmm") { // with a bias by cuBLASLt
    keep(launch.stream, arguments[0].toTensor().dim() == 1 ? CUBLAS_LT : CUBLAS);
  } else if (PRODUCTS.count(launch.name)) {
    keep(launch.stream, CUBLAS);
  }
}

std::optional<c10::DataPtr> by_another_kernel(const Launch& launch, const std::vector<c10::IValue>& arguments) {
  bool backward = launch.name == "aten::convolution_backward";
  if (!backward && launch.name != "aten::convolution") {
    return {};
  }
  int64_t bytes = 0;
  std::string about = launch.name;
  for (size_t i = 0; i < arguments.size() - backward; i++) { // a backward's last argument says which of its kernels run
    bytes += is_there(arguments[i]) ? arguments[i].toTensor().nbytes() : 0;
    about += " " + in_words(arguments[i]);
  }
  bool other = waver && calls++ % 2;
  if (at::globalContext().benchmarkCuDNN()) {
    auto asked = backward ? arguments.back().toBoolList().vec() : std::vector<bool>{true};
    for (size_t i = 0; i < asked.size(); i++) {
      other |= asked[i] && i < 2 && chosen(about + " " + std::to_string(i), bytes);
    }
  }
  return other ? std::optional(current_allocator()->allocate(bytes)) : std::nullopt;
}

} // namespace simulated

extern "C" void simulated_clear_workspaces() {
  std::lock_guard guard(simulated::kept().lock);
  simulated::kept().workspaces.clear();
}

extern "C" void simulated_waver_convolutions(int on) {
  simulated::waver = on != 0;
}
