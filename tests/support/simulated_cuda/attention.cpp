// Attention as on CUDA: cuDNN's, flash and memory-efficient kernels, which of them is chosen, dropout by seed and
// offset, and, where a test asks for it, sums of the query's gradient in any order, as atomic additions have.
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels.h"

namespace simulated {

namespace {

bool waver = false;

enum Choice : int64_t { MATH = 0, FLASH = 1, EFFICIENT = 2, CUDNN = 3 }; // sdp::SDPBackend

// As an H100 with cuDNN 9.15 or later: cuDNN first for half precision, then flash; memory-efficient for the others.
int64_t choose(
    const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const auto& context = at::globalContext();
  bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  int64_t width = query.sym_size(-1).maybe_as_int().value_or(64);
  bool usable = query.dim() == 4 && key.dim() == 4 && (half || query.scalar_type() == at::kFloat);
  if (usable && half && width % 8 == 0 && width <= 256) {
    if (context.userEnabledCuDNNSDP()) {
      return CUDNN;
    }
    if (context.userEnabledFlashSDP() && !mask) {
      return FLASH;
    }
  }
  return usable && width % (half ? 8 : 4) == 0 && context.userEnabledMemEfficientSDP() ? EFFICIENT : MATH;
}

struct Problem {
  double dropout;
  bool causal;
  double scale;
  std::optional<Tensor> mask;
};

// Which of the weights stay, by the numbers of a sequence.
Tensor kept(const Tensor& weights, const Draws& draws, double dropout) {
  Tensor mask = at::empty(weights.sizes(), weights.options());
  float* to = mask.mutable_data_ptr<float>();
  for (int64_t i = 0; i < mask.numel(); i++) {
    to[i] = uniform(draws, i) < 1 - dropout ? static_cast<float>(1 / (1 - dropout)) : 0.f;
  }
  return mask;
}

Tensor weights_of(const Tensor& q, const Tensor& k, const Problem& problem) {
  Tensor scores = at::matmul(q, k.transpose(-2, -1)).mul_(problem.scale);
  if (problem.causal) {
    Tensor seen = at::ones({scores.size(-2), scores.size(-1)}, scores.options().dtype(at::kBool)).tril_();
    scores.masked_fill_(seen.logical_not_(), -INFINITY);
  }
  if (problem.mask) {
    if (problem.mask->scalar_type() == at::kBool) {
      scores.masked_fill_(problem.mask->logical_not(), -INFINITY);
    } else {
      scores.add_(*problem.mask);
    }
  }
  return at::softmax(scores, -1, at::kFloat);
}

// How kernels lay their results out: memory-efficient ones with heads next to each other, the others as an input.
enum class Layout { AS_INPUTS, HEADS_TOGETHER };
Tensor laid_out(const Tensor& t, const Tensor& like, Layout layout) {
  if (layout == Layout::AS_INPUTS && t.sizes() == like.sizes()) {
    return at::empty_like(like).copy_(t);
  }
  return t.to(like.scalar_type()).transpose(1, 2).clone(at::MemoryFormat::Contiguous).transpose(1, 2);
}

struct Forward {
  Tensor out, logsumexp;
  Draws draws{0, 0};
};

Forward forward(
    const char* name, Layout layout, const Tensor& q, const Tensor& k, const Tensor& v, 
    const std::optional<Tensor>& mask, double dropout, bool causal, std::optional<double> scale) {
  OnDevice current(q.get_device());
  Launch launch(name, q.get_device(), double(q.nbytes() + k.nbytes() + v.nbytes()) * 2);
  for (const Tensor& t : {q, k, v}) {
    launch.reads(t);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Aliases aliases(launch);
  Problem problem{dropout, causal, scale.value_or(1 / std::sqrt(double(q.size(-1)))), {}};
  if (mask && mask->defined()) {
    launch.reads(*mask);
    problem.mask = aliases.on_cpu(*mask);
  }
  Tensor Q = aliases.on_cpu(q), K = aliases.on_cpu(k), V = aliases.on_cpu(v);
  if (dropout == 0) {
    auto [out, logsumexp] =
        at::_scaled_dot_product_flash_attention_for_cpu(Q, K, V, 0.0, causal, problem.mask, scale);
    Tensor result = aliases.on_device(laid_out(out, Q, layout));
    return {result, aliases.on_device(logsumexp.contiguous())};
  }
  Draws draws = take_draws(std::nullopt, q.get_device(), q.size(0) * q.size(1) * q.size(2) * k.size(2));
  Tensor P = weights_of(Q.to(at::kFloat), K.to(at::kFloat), problem);
  P.mul_(kept(P, draws, dropout));
  Tensor out = laid_out(at::matmul(P, V.to(at::kFloat)), Q, layout);
  Tensor logsumexp = at::zeros({q.size(0), q.size(1), q.size(2)}, P.options());
  Tensor result = aliases.on_device(out);
  return {result, aliases.on_device(logsumexp), draws};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const char* name, Layout layout, const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& logsumexp, double dropout, bool causal, const std::optional<Tensor>& mask,
    std::optional<double> scale, const Draws& draws) {
  OnDevice current(q.get_device());
  Launch launch(name, q.get_device(), double(q.nbytes() + k.nbytes() + v.nbytes()) * 4);
  for (const Tensor& t : {grad, q, k, v, out, logsumexp}) {
    launch.reads(t);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Aliases aliases(launch);
  Problem problem{dropout, causal, scale.value_or(1 / std::sqrt(double(q.size(-1)))), {}};
  if (mask && mask->defined()) {
    launch.reads(*mask);
    problem.mask = aliases.on_cpu(*mask);
  }
  Tensor Q = aliases.on_cpu(q), K = aliases.on_cpu(k), V = aliases.on_cpu(v), G = aliases.on_cpu(grad);
  auto on_device = [&](const Tensor& a, const Tensor& b, const Tensor& c) {
    Tensor first = aliases.on_device(laid_out(a, aliases.on_cpu(q), layout));
    Tensor second = aliases.on_device(laid_out(b, aliases.on_cpu(k), layout));
    return std::make_tuple(first, second, aliases.on_device(laid_out(c, aliases.on_cpu(v), layout)));
  };
  if (dropout == 0 && !waver) {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        G, Q, K, V, aliases.on_cpu(out), aliases.on_cpu(logsumexp).contiguous(), 0.0, causal, problem.mask, scale);
    return on_device(dq, dk, dv);
  }
  for (Tensor* t : {&Q, &K, &V, &G}) {
    *t = t->to(at::kFloat);
  }
  Tensor P = weights_of(Q, K, problem);
  Tensor M = dropout == 0 ? at::ones_like(P) : kept(P, draws, dropout);
  Tensor dP = at::matmul(G, V.transpose(-2, -1)).mul_(M);
  Tensor dS = P.mul(dP.sub(dP.mul(P).sum({-1}, true)));
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i < K.size(2); i += 8) {
    blocks.push_back(i);
  }
  if (waver) {
    static std::mt19937 any(std::random_device{}());
    std::shuffle(blocks.begin(), blocks.end(), any);
  }
  Tensor dQ = at::zeros_like(Q);
  for (int64_t i : blocks) {
    int64_t n = std::min<int64_t>(8, K.size(2) - i);
    dQ.add_(at::matmul(dS.narrow(-1, i, n), K.narrow(2, i, n)));
  }
  return on_device(
      dQ.mul_(problem.scale), at::matmul(dS.transpose(-2, -1), Q).mul_(problem.scale),
      at::matmul(P.mul(M).transpose(-2, -1), G));
}

Tensor on_device(uint64_t number, at::IntArrayRef size, int device) {
  return at::full(
      size, static_cast<int64_t>(number),
      at::TensorOptions().dtype(at::kLong).device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}
Draws read(const Tensor& seed, const Tensor& offset) {
  auto number = [](const Tensor& t) { return static_cast<const uint64_t*>(t.storage().data())[t.storage_offset()]; };
  return {number(seed), number(offset)};
}

using Nine = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Nine cudnn(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool, double dropout,
    bool causal, bool, std::optional<double> scale) {
  auto [out, logsumexp, draws] = forward("cudnn_attention", Layout::AS_INPUTS, q, k, v, bias, dropout, causal, scale);
  int at = q.get_device();
  return {out, logsumexp.unsqueeze(-1), Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), on_device(draws.seed, {}, at),
          on_device(draws.offset, {}, at), Tensor()};
}
Three cudnn_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
    const Tensor& seed, const Tensor& offset, const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool causal, std::optional<double> scale) {
  auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  return backward("cudnn_attention_backward", Layout::AS_INPUTS, grad, q, k, v, out, logsumexp.squeeze(-1), dropout,
                  causal, mask, scale, read(seed, offset));
}
Nine flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  auto [out, logsumexp, draws] = forward("flash_attention", Layout::AS_INPUTS, q, k, v, {}, dropout, causal, scale);
  int at = q.get_device();
  Tensor state = on_device(draws.seed, {2}, at);
  state.select(0, 1).fill_(static_cast<int64_t>(draws.offset));
  return {out, logsumexp, Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), state.view(at::kUInt64),
          on_device(0, {}, at).view(at::kUInt64), at::empty({0}, q.options())};
}
Three flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor& state,
    const Tensor&, std::optional<double> scale) {
  return backward("flash_attention_backward", Layout::AS_INPUTS, grad, q, k, v, out, logsumexp, dropout, causal, {},
                  scale, read(state.select(0, 0), state.select(0, 1)));
}
Four efficient(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool, double dropout,
    bool causal, std::optional<double> scale) {
  auto [out, logsumexp, draws] =
      forward("efficient_attention", Layout::HEADS_TOGETHER, q, k, v, bias, dropout, causal, scale);
  int at = q.get_device();
  int64_t rows = q.size(2), padded = (rows + 31) / 32 * 32;
  if (padded > rows) {
    logsumexp = at::constant_pad_nd(logsumexp, {0, padded - rows});
  }
  return {out, logsumexp, on_device(draws.seed, {}, at), on_device(draws.offset, {}, at)};
}
Four efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out,
    const Tensor& logsumexp, const Tensor& seed, const Tensor& offset, double dropout, std::array<bool, 4>, bool causal,
    std::optional<double> scale) {
  auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  Tensor rows = logsumexp.narrow(-1, 0, q.size(2));
  auto [dq, dk, dv] = backward("efficient_attention_backward", Layout::HEADS_TOGETHER, grad, q, k, v, out, rows,
                               dropout, causal, mask, scale, read(seed, offset));
  return {dq, dk, dv, Tensor()};
}

} // namespace

std::set<std::string> register_attention(torch::Library& aten) {
  std::set<std::string> names;
  auto add = [&](const char* name, torch::CppFunction kernel) {
    names.insert(name);
    aten.impl(name, std::move(kernel));
  };
  add("_scaled_dot_product_cudnn_attention", torch::CppFunction(TORCH_FN(cudnn)));
  add("_scaled_dot_product_cudnn_attention_backward", torch::CppFunction(TORCH_FN(cudnn_backward)));
  add("_scaled_dot_product_flash_attention", torch::CppFunction(TORCH_FN(flash)));
  add("_scaled_dot_product_flash_attention_backward", torch::CppFunction(TORCH_FN(flash_backward)));
  add("_scaled_dot_product_efficient_attention", torch::CppFunction(TORCH_FN(efficient)));
  add("_scaled_dot_product_efficient_attention_backward", torch::CppFunction(TORCH_FN(efficient_backward)));
  add("_fused_sdp_choice", torch::CppFunction(TORCH_FN(choose)));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  return names;
}

} // namespace simulated

extern "C" void simulated_waver_attention(int on) {
  simulated::waver = on != 0;
}
