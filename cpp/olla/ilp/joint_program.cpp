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
    : OrderProgram(arena, shortening(options), stop) {
  if (outcome_ != Outcome::kBuilt) return;
  const double height = static_cast<double>(options.target / unit_);
  bool too_large = !exact() || height > kLargestAddress;
  tolerance_ = std::min(tolerance_, address_tolerance(height));
  buffers_ = arena_buffers(arena, &*closure_);
  for (const ArenaBuffer& buffer : buffers_) {
    addresses_.size.push_back(static_cast<double>(buffer.size / unit_));
    addresses_.lower.push_back(0.0);
    addresses_.upper.push_back(height - addresses_.size.back());
  }
  addresses_.add_columns();
  for (std::int32_t i = 0; i < addresses_.num_buffers() && !too_large; ++i) {
    addresses_.under(i, peak_, static_cast<double>(base_ / unit_));
    for (std::int32_t j = 0; j < i; ++j) add_pair(j, i);
    too_large = program_.num_nonzeros() > options.max_nonzeros;
  }
  if (!too_large) return;
  outcome_ = Outcome::kTooLarge;
  program_ = {};
}

bool JointProgram::certainly_before(OpId u, OpId v) const {
  const auto& [earliest, latest] = windows_.spans;
  if (u == v) return false;
  if (closure_->before.test(v, u) || latest[u] < earliest[v]) return true;
  return blocks_.block[u] == blocks_.block[v] && blocks_.offset[u] < blocks_.offset[v];
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

void JointProgram::add_pair(std::int32_t i, std::int32_t j) {
  const ArenaBuffer &one = buffers_[i], &other = buffers_[j];
  if (certainly_apart(one, other) || certainly_apart(other, one)) return;
  if (twins(one, other)) return addresses_.below(i, j);
  const bool first = possibly_apart(one, other), second = possibly_apart(other, one);
  Pair pair{i, j, {program_.add_column(0.0, 0.0, 1.0, true), -1}, {-1, -1}};
  addresses_.below_if(i, j, pair.below[0], true);
  if (!first && !second) {
    addresses_.below_if(j, i, pair.below[0], false);
  } else {
    pair.below[1] = program_.add_column(0.0, 0.0, 1.0, true);
    addresses_.below_if(j, i, pair.below[1], true);
    std::vector<Term> terms{{pair.below[0], 1.0}, {pair.below[1], 1.0}};
    if (first) terms.push_back({pair.dead[0] = add_death(one, other), 1.0});
    if (second) terms.push_back({pair.dead[1] = add_death(other, one), 1.0});
    program_.add_row(1.0, Program::kInfinity, terms);
  }
  pairs_.push_back(pair);
}

// The column e[i,j]. Of rows with the same columns the first implies the others.
Column JointProgram::add_death(const ArenaBuffer& i, const ArenaBuffer& j) {
  const Column dead = program_.add_column(0.0, 0.0, 1.0, false);
  const auto& [earliest, latest] = windows_.spans;
  for (const OpId u : i.last_users) {
    if (certainly_before(u, j.producer)) continue;
    std::pair<Column, Column> previous{-1, -1};
    for (Step t = earliest[j.producer]; t <= latest[j.producer]; ++t) {
      const auto born = has_run(j.producer, t), done = has_run(u, t - 1);
      const std::pair columns{born.column, done.column};
      if ((born.column < 0 && born.constant == 0.0) || (done.column < 0 && done.constant == 1.0) || columns == previous) continue;
      previous = columns;
      Sum sum;
      sum.add({dead, 0.0}, 1.0);
      sum.add(born, 1.0);
      sum.add(done, -1.0);
      program_.add_row(-Program::kInfinity, 1.0 - sum.constant, sum.terms);
    }
  }
  return dead;
}

std::vector<double> JointProgram::encode(const Arrangement& arrangement) const {
  std::vector<double> values = OrderProgram::encode(arrangement.order);
  if (values.empty()) return {};
  const std::vector<Buffer> lifetimes = lifetimes_of(buffers_, gather(blocks_, arrangement.order));
  std::vector<double> keys(arrangement.offsets.begin(), arrangement.offsets.end());
  sort_twins(keys, [this](std::size_t i, std::size_t j) { return twins(buffers_[i], buffers_[j]); });
  const std::vector<Offset> offsets = settle(lifetimes, keys, {});
  double& arena = values[peak_];
  arena = std::max(arena, static_cast<double>((true_height(lifetimes, offsets) - base_) / unit_));
  if (arena > program_.upper[peak_]) return {};
  addresses_.encode(offsets, unit_, values);
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
  Arrangement result{OrderProgram::decode(values), {}};
  result.offsets = settle(lifetimes_of(buffers_, result.order), addresses_.decode(values), {});
  return result;
}

}  // namespace olla
