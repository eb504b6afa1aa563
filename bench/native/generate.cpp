#include "generate.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <utility>

namespace olla::bench {
namespace {

constexpr Bytes kItem = 4;  // float32

// Records ops, and for each layer what to record when the backward pass comes round.
class Tape {
 public:
  TensorId tensor(Bytes bytes) {
    step_.data.tensor_bytes.push_back(bytes);
    step_.data.donated.push_back(0);
    gradient_.push_back(kNone);
    return static_cast<TensorId>(step_.data.tensor_bytes.size()) - 1;
  }
  TensorId parameter(Bytes bytes) { return parameters_.emplace_back(tensor(bytes)); }
  Bytes bytes(TensorId t) const { return step_.data.tensor_bytes[t]; }
  OpId num_ops() const { return static_cast<OpId>(step_.data.workspace_bytes.size()); }

  std::vector<TensorId> op(std::vector<TensorId> reads, const std::vector<Bytes>& sizes,
                           const std::vector<TensorId>& mutates = {}) {
    std::vector<TensorId> writes;
    for (const Bytes size : sizes) writes.push_back(tensor(size));
    GraphData& data = step_.data;
    data.reads.push_back(reads);
    data.writes.push_back(writes);
    data.mutates.push_back(mutates);
    data.after.push_back({});
    data.workspace_bytes.push_back(0);
    data.random.push_back(0);
    return writes;
  }
  TensorId make(std::vector<TensorId> reads, Bytes size) { return op(std::move(reads), {size}).front(); }
  void in_place(TensorId target, std::vector<TensorId> reads = {}) {
    reads.push_back(target);
    op(std::move(reads), {}, {target});
  }

  // Layers. pointwise saves its input for the backward pass, as most activations do.
  TensorId affine(TensorId x, Bytes width_in, Bytes width_out) {
    const TensorId w = parameter(width_in * width_out * kItem), b = parameter(width_out * kItem);
    const TensorId y = make({w, b, x}, bytes(x) / width_in * width_out);
    backward_.push_back([=, this] {
      const TensorId dy = take(y), dx = make({w, dy}, bytes(x));
      give(w, make({x, dy}, bytes(w)));
      give(b, make({dy}, bytes(b)));
      give(x, dx);
    });
    return y;
  }
  TensorId norm(TensorId x, Bytes width) {
    const TensorId w = parameter(width * kItem), b = parameter(width * kItem);
    const auto y = op({w, b, x}, {bytes(x), bytes(w), bytes(w)});
    backward_.push_back([=, this] {
      const auto d = op({w, x, y[1], y[2], take(y[0])}, {bytes(x), bytes(w), bytes(b)});
      give(w, d[1]);
      give(b, d[2]);
      give(x, d[0]);
    });
    return y[0];
  }
  TensorId pointwise(TensorId x) {
    const TensorId y = make({x}, bytes(x));
    backward_.push_back([=, this] { give(x, make({x, take(y)}, bytes(x))); });
    return y;
  }
  TensorId product(TensorId x, TensorId y, Bytes size) {
    const TensorId z = make({x, y}, size);
    backward_.push_back([=, this] {
      const TensorId dz = take(z);
      give(y, make({x, dz}, bytes(y)));
      give(x, make({y, dz}, bytes(x)));
    });
    return z;
  }
  TensorId add(TensorId x, TensorId y) {
    const TensorId z = make({x, y}, bytes(x));
    backward_.push_back([=, this] {
      const TensorId dz = take(z);
      give(x, dz);
      give(y, dz);
    });
    return z;
  }
  TensorId convolution(TensorId x, Bytes channels_in, Bytes channels_out, Bytes kernel, Bytes area) {
    const TensorId w = parameter(channels_in * channels_out * kernel * kernel * kItem);
    const TensorId y = make({w, x}, channels_out * area * kItem);
    backward_.push_back([=, this] {
      const auto d = op({w, x, take(y)}, {bytes(x), bytes(w)});
      give(w, d[1]);
      give(x, d[0]);
    });
    return rectify(norm(y, channels_out));
  }
  TensorId concatenate(const std::vector<TensorId>& parts) {
    Bytes size = 0;
    for (const TensorId part : parts) size += bytes(part);
    const TensorId y = make(parts, size);
    backward_.push_back([=, this] {
      const TensorId dy = take(y);
      for (const TensorId part : parts) give(part, dy);
    });
    return y;
  }

  // Backward pass from the loss, then the updates: seven ops per parameter, as Adam's.
  TrainingStep finish(TensorId loss, bool clip) {
    give(loss, make({loss}, bytes(loss)));
    for (; !backward_.empty(); backward_.pop_back()) backward_.back()();
    step_.first_update = num_ops();
    if (clip) clip_gradients();
    for (const TensorId p : parameters_) {
      const TensorId mean = tensor(bytes(p)), square = tensor(bytes(p));
      in_place(mean, {gradient_[p]});
      in_place(square);
      in_place(square, {gradient_[p]});
      const TensorId root = make({square}, bytes(p));
      in_place(root);
      in_place(root);
      in_place(p, {mean, root});
    }
    return outputs({loss});
  }
  TrainingStep outputs(std::vector<TensorId> tensors) {
    step_.data.outputs = std::move(tensors);
    return std::move(step_);
  }

 private:
  static constexpr TensorId kNone = -1;

  TensorId rectify(TensorId x) {
    in_place(x);
    backward_.push_back([=, this] { gradient_[x] = make({x, gradient_[x]}, bytes(x)); });
    return x;
  }
  TensorId take(TensorId t) { return std::exchange(gradient_[t], kNone); }
  void give(TensorId t, TensorId gradient) {
    if (gradient_[t] != kNone) gradient = make({gradient_[t], gradient}, bytes(t));
    gradient_[t] = gradient;
  }
  void clip_gradients() {
    std::vector<TensorId> norms;
    for (const TensorId p : parameters_) norms.push_back(make({gradient_[p]}, kItem));
    const TensorId factor = make({make(norms, kItem)}, kItem);
    for (const TensorId p : parameters_) in_place(gradient_[p], {factor});
  }

  TrainingStep step_;
  std::vector<TensorId> parameters_, gradient_;  // gradient_ of tensor t, or kNone
  std::vector<std::function<void()>> backward_;
};

TensorId transformer(Tape& tape, std::int64_t num_layers) {
  constexpr Bytes kTokens = 1024, kWidth = 768, kHeads = 12, kVocabulary = 50'257;
  const Bytes score = kHeads * kTokens * kTokens * kItem;
  TensorId x = tape.tensor(kTokens * kWidth * kItem);
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    const TensorId y = tape.norm(x, kWidth);
    const TensorId query = tape.affine(y, kWidth, kWidth), key = tape.affine(y, kWidth, kWidth),
                   value = tape.affine(y, kWidth, kWidth);
    const TensorId weight = tape.pointwise(tape.product(query, key, score));
    x = tape.add(x, tape.affine(tape.product(weight, value, tape.bytes(x)), kWidth, kWidth));
    TensorId z = tape.affine(tape.norm(x, kWidth), kWidth, 4 * kWidth);
    for (int i = 0; i < 3; ++i) z = tape.pointwise(z);
    x = tape.add(x, tape.affine(z, 4 * kWidth, kWidth));
  }
  const TensorId log = tape.pointwise(tape.affine(x, kWidth, kVocabulary));
  return tape.product(log, tape.tensor(kTokens * 8), kItem);
}

// A layer is a residual and an inception block; four stages, each with half the resolution and twice the channels of the last.
TensorId convnet(Tape& tape, std::int64_t num_layers) {
  Bytes channels = 128, area = 56 * 56;
  TensorId x = tape.convolution(tape.tensor(3 * 224 * 224 * kItem), 3, channels, 7, area);
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    if (layer > 0 && 4 * layer / num_layers > 4 * (layer - 1) / num_layers) {
      area /= 4;
      x = tape.convolution(x, channels, 2 * channels, 3, area);
      channels *= 2;
    }
    const Bytes inner = channels / 4, part = channels / 4;
    TensorId y = tape.convolution(tape.convolution(x, channels, inner, 1, area), inner, inner, 3, area);
    x = tape.add(x, tape.convolution(y, inner, channels, 1, area));
    std::vector<TensorId> branches;
    for (const Bytes kernel : {1, 3, 5, 7})
      branches.push_back(tape.convolution(tape.convolution(x, channels, inner, 1, area), inner, part, kernel, area));
    x = tape.concatenate(branches);
  }
  const TensorId pooled = tape.product(x, tape.tensor(kItem), channels * kItem);
  return tape.product(tape.affine(pooled, channels, 1000), tape.tensor(8), kItem);
}

TrainingStep tangle(std::int64_t num_ops) {
  constexpr std::size_t kWindow = 24;
  std::mt19937_64 random(1);  // its numbers are the same everywhere, those of std's distributions are not
  Tape tape;
  std::vector<TensorId> recent{tape.tensor(kItem)};
  for (std::int64_t i = 0; i < num_ops; ++i) {
    std::vector<TensorId> reads;
    for (std::uint64_t left = 1 + random() % 3; left > 0; --left) reads.push_back(recent[random() % recent.size()]);
    recent.push_back(tape.make(std::move(reads), static_cast<Bytes>(1 + random() % 1000)));
    if (recent.size() > kWindow) recent.erase(recent.begin());
  }
  return tape.finish(recent.back(), false);
}

TensorId many_tables(Tape& tape, std::int64_t num_tables) {
  constexpr Bytes kRows = 64, kWidth = 16;
  std::mt19937_64 random(1);
  std::vector<TensorId> parts;
  for (std::int64_t i = 0; i < num_tables; ++i)
    parts.push_back(tape.affine(tape.tensor(kRows * kItem), 1, kWidth * static_cast<Bytes>(1 + random() % 100)));
  return tape.product(tape.concatenate(parts), tape.tensor(kRows), kItem);
}

TrainingStep tree(std::int64_t num_ops) {
  constexpr std::int64_t kChain = 3;
  std::mt19937_64 random(1);
  Tape tape;
  const auto size = [&] { return static_cast<Bytes>(1 + random() % 4096); };
  std::vector<TensorId> open;
  for (std::int64_t i = 0; i < std::max<std::int64_t>(1, num_ops / (kChain + 1)); ++i) {
    open.push_back(tape.make({}, size()));
    for (std::int64_t j = 1; j < kChain; ++j) open.back() = tape.make({open.back()}, size());
  }
  for (std::size_t i = 0; i + 1 < open.size(); i += 2) open.push_back(tape.make({open[i], open[i + 1]}, size()));
  return tape.outputs({open.back()});
}

TrainingStep record(const StackOptions& options, std::int64_t num_layers) {
  Tape tape;
  const TensorId loss = options.family == Family::kTransformer ? transformer(tape, num_layers)
                        : options.family == Family::kTables    ? many_tables(tape, num_layers)
                                                               : convnet(tape, num_layers);
  return tape.finish(loss, options.clip);
}

}  // namespace

TrainingStep stack(const StackOptions& options) {
  if (options.family == Family::kTangle) return tangle(options.num_ops);
  if (options.family == Family::kTree) return tree(options.num_ops);
  const auto ops = [&](std::int64_t num_layers) { return record(options, num_layers).data.reads.size(); };
  const double few = static_cast<double>(ops(4)), per_layer = static_cast<double>(ops(5)) - few;
  const double num_layers = 4 + std::round((static_cast<double>(options.num_ops) - few) / per_layer);
  return record(options, std::max<std::int64_t>(1, static_cast<std::int64_t>(num_layers)));
}

std::vector<OpId> hoisted_order(const Graph& graph, OpId first_update) {
  std::vector<OpId> ready(graph.num_ops(), kNoOp), order(graph.num_ops());  // ready: the last op before the updates that op v needs
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    if (v < first_update)
      ready[v] = v;
    else
      for (const OpId u : graph.preds(v)) ready[v] = std::max(ready[v], ready[u]);
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](OpId a, OpId b) { return ready[a] < ready[b]; });
  return order;
}

}  // namespace olla::bench
