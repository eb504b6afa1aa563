// Batch norm of cuDNN, and attention that does not keep its scores.
#include "specials.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>
#include <map>

namespace standin {
namespace {

using torch::jit::Stack;

Stack batch_norm(const Stack& in, std::uint64_t) {
  auto [out, mean, inverse] = at::native_batch_norm(
      in[0].toTensor(), in[1].toOptional<at::Tensor>(), in[2].toOptional<at::Tensor>(), in[3].toOptional<at::Tensor>(),
      in[4].toOptional<at::Tensor>(), in[5].toBool(), in[6].toDouble(), in[7].toDouble());
  return {out, mean, inverse};  // the fourth, cuDNN's own reserve, is not read
}
Stack batch_norm_backward(const Stack& in, std::uint64_t) {
  auto [input, weight, bias] =
      at::native_batch_norm_backward(in[1].toTensor(), in[0].toTensor(), in[2].toOptional<at::Tensor>(),
                                     in[3].toOptional<at::Tensor>(), in[4].toOptional<at::Tensor>(), in[5].toOptional<at::Tensor>(),
                                     in[6].toOptional<at::Tensor>(), true, in[7].toDouble(), {true, true, true});
  return {input, weight, bias};
}

// Attention as its definition has it. Shapes: queries [b, h, n, d], keys [b, h, m, d], values [b, h, m, e].
struct Attention {
  at::Tensor query, key, value;
  double scale;
  at::Tensor probabilities, kept, log_sum_exp;  // kept: of dropout, times 1 / (1 - p)

  Attention(const Stack& in, size_t at, const c10::IValue& bias, bool causal, double dropout, const c10::IValue& given_scale,
            std::uint64_t seed)
      : query(in[at].toTensor()), key(in[at + 1].toTensor()), value(in[at + 2].toTensor()) {
    scale = given_scale.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : given_scale.toDouble();
    at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) * scale;
    if (bias.isTensor() && bias.toTensor().defined()) scores = scores + bias.toTensor();
    if (causal)
      scores = scores.masked_fill(at::ones({query.size(-2), key.size(-2)}, at::kBool).tril().logical_not(),
                                  -std::numeric_limits<double>::infinity());
    log_sum_exp = at::logsumexp(scores, {-1});
    probabilities = at::softmax(scores, -1);
    kept = at::ones_like(probabilities);
    if (dropout > 0) kept = kept.bernoulli_(1 - dropout, at::detail::createCPUGenerator(seed)) / (1 - dropout);
  }
};

Stack attention(const Stack& in, std::uint64_t seed) {  // q, k, v, bias, with log-sum-exp, dropout, causal, scale
  const Attention made(in, 0, in[3], in[6].toBool(), in[5].toDouble(), in[7], seed);
  const at::Tensor drawn = at::full({}, static_cast<std::int64_t>(seed), at::kLong);
  const std::int64_t rows = made.log_sum_exp.size(-1), padding = (rows + 31) / 32 * 32 - rows;  // the kernel's rows are of 32
  return {at::matmul(made.probabilities * made.kept, made.value), at::constant_pad_nd(made.log_sum_exp, {0, padding}), drawn,
          at::zeros({}, at::kLong)};
}
Stack attention_backward(const Stack& in,
                         std::uint64_t) {  // grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal, scale
  const double dropout = in[9].toDouble();
  const std::uint64_t seed = dropout > 0 ? static_cast<std::uint64_t>(in[7].toTensor().item<std::int64_t>()) : 0;
  const Attention made(in, 1, in[4], in[11].toBool(), dropout, in[12], seed);
  const at::Tensor grad = in[0].toTensor();
  const at::Tensor weights = made.probabilities * made.kept;
  const at::Tensor of_value = at::matmul(weights.transpose(-2, -1), grad);
  const at::Tensor of_weights = at::matmul(grad, made.value.transpose(-2, -1)) * made.kept;
  const at::Tensor of_scores = made.probabilities * (of_weights - (of_weights * made.probabilities).sum(-1, true));
  return {at::matmul(of_scores, made.key) * made.scale, at::matmul(of_scores.transpose(-2, -1), made.query) * made.scale, of_value,
          of_scores};
}

}  // namespace

Special special_of(const std::string& name) {
  static const std::map<std::string, Special> kSpecials{
      {"aten::cudnn_batch_norm", batch_norm},
      {"aten::cudnn_batch_norm_backward", batch_norm_backward},
      {"aten::_scaled_dot_product_efficient_attention", attention},
      {"aten::_scaled_dot_product_efficient_attention_backward", attention_backward},
  };
  const auto found = kSpecials.find(name);
  return found == kSpecials.end() ? nullptr : found->second;
}

}  // namespace standin
