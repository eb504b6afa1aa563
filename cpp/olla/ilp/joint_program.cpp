#include "olla/ilp/joint_program.hpp"

#include <algorithm>

namespace olla {

Graph arena_graph(const Graph& graph, Bytes alignment) {
  GraphData data = graph.data();
  const auto rounded = [&](Bytes bytes) { return (bytes + alignment - 1) / alignment * alignment; };
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    data.tensor_bytes[t] = graph.producer(t) == kNoOp ? 0 : rounded(graph.bytes(t));
  }
  for (Bytes& bytes : data.workspace_bytes) bytes = rounded(bytes);
  std::vector<Edge> edges;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    for (const OpId u : graph.preds(v)) edges.emplace_back(u, v);
  }
  return Graph(std::move(data)).constrained(edges);
}

std::vector<ArenaBuffer> arena_buffers(const Graph& arena, const Closure* closure) {
  std::vector<ArenaBuffer> buffers;
  for (TensorId t = 0; t < arena.num_tensors(); ++t) {
    if (arena.producer(t) == kNoOp || arena.bytes(t) == 0) continue;
    ArenaBuffer buffer{arena.producer(t), t, {}, arena.output(t), arena.bytes(t)};
    const auto users = arena.users(t);
    for (const OpId u : users) {
      const auto follows = [&](OpId w) { return w != u && closure != nullptr && closure->before.test(w, u); };
      if (std::ranges::none_of(users, follows)) buffer.last_users.push_back(u);
    }
    if (users.empty()) buffer.last_users.push_back(buffer.producer);
    buffers.push_back(std::move(buffer));
  }
  for (OpId v = 0; v < arena.num_ops(); ++v) {
    if (arena.workspace(v) > 0) buffers.push_back({v, -1, {v}, false, arena.workspace(v)});
  }
  return buffers;
}

std::vector<Buffer> lifetimes_of(std::span<const ArenaBuffer> buffers, std::span<const OpId> order) {
  std::vector<Step> step(order.size());
  for (std::size_t s = 0; s < order.size(); ++s) step[order[s]] = static_cast<Step>(s);
  std::vector<Buffer> result;
  for (const ArenaBuffer& buffer : buffers) {
    Step last = step[buffer.producer];
    for (const OpId u : buffer.last_users) last = std::max(last, step[u]);
    if (buffer.output) last = static_cast<Step>(order.size()) - 1;
    result.push_back({step[buffer.producer], last + 1, buffer.size});
  }
  return result;
}

namespace {

OrderProgramOptions shortening(OrderProgramOptions options) {
  options.moves = Moves::kShortening;
  options.split = true;
  return options;
}

}  // namespace

JointProgram::JointProgram(const Graph& arena, const OrderProgramOptions& options, const std::function<bool()>& stop)
    : order_(arena, shortening(options), stop), outcome_(order_.outcome()) {
  if (outcome_ != Outcome::kBuilt) return;
  const Bytes unit = order_.unit();
  const double height = static_cast<double>(options.target / unit);
  if (!order_.exact() || height > kLargestAddress) {
    outcome_ = Outcome::kTooLarge;
    return;
  }
  program_ = order_.program();
  tolerance_ = std::min(order_.tolerance(), address_tolerance(height));
  buffers_ = arena_buffers(arena, &order_.closure());
  std::vector<double> sizes;
  for (const ArenaBuffer& buffer : buffers_) sizes.push_back(static_cast<double>(buffer.size / unit));
  AddressColumns addresses(program_, sizes);
  for (const double size : sizes) addresses.add(0.0, height - size);
  const auto n = static_cast<std::int32_t>(buffers_.size());
  for (std::int32_t i = 0; i < n; ++i) {
    columns_.push_back(addresses.column(i));
    addresses.under(i, order_.peak_column(), static_cast<double>(order_.base() / unit));
    for (std::int32_t j = 0; j < i; ++j) add_pair(addresses, j, i);
    if (program_.num_nonzeros() <= options.max_nonzeros) continue;
    outcome_ = Outcome::kTooLarge;
    program_ = {};
    return;
  }
}

bool JointProgram::certainly_before(OpId u, OpId v) const {
  const Blocks& blocks = order_.blocks();
  const Spans& spans = order_.windows().spans;
  if (u == v) return false;
  if (order_.closure().before.test(v, u) || spans.latest[u] < spans.earliest[v]) return true;
  return blocks.block[u] == blocks.block[v] && blocks.offset[u] < blocks.offset[v];
}

bool JointProgram::certainly_apart(const ArenaBuffer& i, const ArenaBuffer& j) const {
  return !i.output && std::ranges::all_of(i.last_users, [&](OpId u) { return certainly_before(u, j.producer); });
}

bool JointProgram::possibly_apart(const ArenaBuffer& i, const ArenaBuffer& j) const {
  const auto not_before = [&](OpId u) { return u == j.producer || certainly_before(j.producer, u); };
  return !i.output && std::ranges::none_of(i.last_users, not_before);
}

bool JointProgram::twins(const ArenaBuffer& i, const ArenaBuffer& j) const {
  return i.producer == j.producer && i.output == j.output && i.size == j.size && (i.output || i.last_users == j.last_users);
}

void JointProgram::add_pair(AddressColumns& addresses, std::int32_t i, std::int32_t j) {
  const ArenaBuffer &one = buffers_[i], &other = buffers_[j];
  if (certainly_apart(one, other) || certainly_apart(other, one)) return;
  if (twins(one, other)) return addresses.below(i, j);
  const bool first = possibly_apart(one, other), second = possibly_apart(other, one);
  Pair pair{i, j, {program_.add_column(0.0, 0.0, 1.0, true), -1}, {-1, -1}};
  addresses.below_if(i, j, pair.below[0], true);
  if (!first && !second) {
    addresses.below_if(j, i, pair.below[0], false);
  } else {
    pair.below[1] = program_.add_column(0.0, 0.0, 1.0, true);
    addresses.below_if(j, i, pair.below[1], true);
    std::vector<Term> terms{{pair.below[0], 1.0}, {pair.below[1], 1.0}};
    if (first) terms.push_back({pair.dead[0] = add_death(one, other), 1.0});
    if (second) terms.push_back({pair.dead[1] = add_death(other, one), 1.0});
    program_.add_row(1.0, Program::kInfinity, terms);
  }
  pairs_.push_back(pair);
}

// The column e[i,j]. Of rows with the same columns the first says all.
Column JointProgram::add_death(const ArenaBuffer& i, const ArenaBuffer& j) {
  const Column dead = program_.add_column(0.0, 0.0, 1.0, false);
  const Spans& spans = order_.windows().spans;
  for (const OpId u : i.last_users) {
    if (certainly_before(u, j.producer)) continue;
    std::pair<Column, Column> previous{-1, -1};
    for (Step t = spans.earliest[j.producer]; t <= spans.latest[j.producer]; ++t) {
      const auto born = order_.has_run(j.producer, t), done = order_.has_run(u, t - 1);
      const std::pair columns{born.column, done.column};
      if ((born.column < 0 && born.constant == 0.0) || (done.column < 0 && done.constant == 1.0) || columns == previous) continue;
      previous = columns;
      std::vector<Term> terms{{dead, 1.0}};
      double upper = 1.0;
      if (born.column >= 0) terms.push_back({born.column, 1.0});
      if (born.column < 0) upper -= 1.0;
      if (done.column >= 0) terms.push_back({done.column, -1.0});
      program_.add_row(-Program::kInfinity, upper, terms);
    }
  }
  return dead;
}

std::vector<double> JointProgram::encode(const Arrangement& arrangement) const {
  std::vector<double> values = order_.encode(arrangement.order);
  if (values.empty()) return {};
  values.resize(program_.num_columns(), 0.0);
  const std::vector<Buffer> lifetimes = lifetimes_of(buffers_, gather(order_.blocks(), arrangement.order));
  const auto n = static_cast<std::int32_t>(buffers_.size());
  std::vector<double> keys(arrangement.offsets.begin(), arrangement.offsets.end());
  for (std::int32_t i = 0; i < n; ++i) {
    for (std::int32_t j = i + 1; j < n; ++j) {
      if (keys[j] < keys[i] && twins(buffers_[i], buffers_[j])) std::swap(keys[i], keys[j]);
    }
  }
  const std::vector<Offset> offsets = settle(lifetimes, keys, {});
  const Bytes unit = order_.unit(), height = true_height(lifetimes, offsets);
  double& arena = values[order_.peak_column()];
  arena = std::max(arena, static_cast<double>((height - order_.base()) / unit));
  if (arena > program_.upper[order_.peak_column()]) return {};
  for (std::int32_t i = 0; i < n; ++i) {
    if (columns_[i] >= 0) values[columns_[i]] = static_cast<double>(offsets[i] / unit);
  }
  for (const Pair& pair : pairs_) {
    const auto [i, j] = std::pair(pair.i, pair.j);
    values[pair.below[0]] = offsets[i] + buffers_[i].size <= offsets[j] ? 1.0 : 0.0;
    if (pair.below[1] >= 0) values[pair.below[1]] = offsets[j] + buffers_[j].size <= offsets[i] ? 1.0 : 0.0;
    if (pair.dead[0] >= 0) values[pair.dead[0]] = lifetimes[i].upper <= lifetimes[j].lower ? 1.0 : 0.0;
    if (pair.dead[1] >= 0) values[pair.dead[1]] = lifetimes[j].upper <= lifetimes[i].lower ? 1.0 : 0.0;
  }
  return values;
}

Arrangement JointProgram::decode(std::span<const double> values) const {
  Arrangement result{order_.decode(values), {}};
  std::vector<double> keys;
  for (const Column column : columns_) keys.push_back(column >= 0 ? values[column] : 0.0);
  result.offsets = settle(lifetimes_of(buffers_, result.order), keys, {});
  return result;
}

}  // namespace olla
