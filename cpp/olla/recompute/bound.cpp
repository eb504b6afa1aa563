#include "olla/recompute/bound.hpp"

#include <algorithm>
#include <cmath>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

constexpr double kScale = 256;                  // capacities are bytes times this: rounding down loses next to nothing
constexpr Bytes kMaxCapacity = Bytes{1} << 60;  // one edge; above every sum of sizes that matters
constexpr int kMaxCuts = 24;
constexpr double kRounding = 1e-9;  // of floating-point sums of seconds

}  // namespace

// preds_ orders first runs: an op follows the makers of its values, its `after` list, the previous random op, and the other users
// of a tensor without producer that it overwrites.
RecomputeBound::RecomputeBound(const Graph& graph, const Values& values, const Rules& rules)
    : graph_(graph),
      values_(values),
      rules_(rules),
      value_node_(values.num_values(), -1),
      op_node_(graph.num_ops(), -1),
      rerun_reads_(values.num_values()),
      at_hand_(values.num_values()),
      lost_(values.num_values()) {
  std::vector<OpId> list;
  OpId last_random = kNoOp;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    list.clear();
    for (const auto& used : {values.reads[v], values.overwrites[v]}) {
      for (const ValueId x : used) {
        if (values.producer[x] != kNoOp) list.push_back(values.producer[x]);
      }
    }
    for (const ValueId x : values.overwrites[v]) {
      if (graph.producer(values.tensor[x]) != kNoOp) continue;
      for (const OpId u : values.readers[x]) {
        if (u != v) list.push_back(u);
      }
    }
    for (const OpId u : graph.data().after[v]) list.push_back(u);
    if (graph.data().random[v] != 0) {
      if (last_random != kNoOp) list.push_back(last_random);
      last_random = v;
    }
    sort_unique(list);
    preds_.push_back(list);
  }
  succs_ = transposed(preds_, graph.num_ops());
}

void RecomputeBound::mark(OpId t, bool ancestors) {
  queue_.assign(1, t);
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    for (const OpId u : ancestors ? preds_[queue_[i]] : succs_[queue_[i]]) {
      if (side_[u] != kFree) continue;
      side_[u] = ancestors ? kBefore : kAfter;
      queue_.push_back(u);
    }
  }
}

// The inputs that any run of op v after t needs. A free op may have its first run there or a rerun: only inputs of both count.
void RecomputeBound::find_inputs(OpId v) {
  const auto reads = values_.replays[v] != Values::kNot ? values_.reads[v] : values_.rerun_reads[v];
  inputs_.clear();
  if (side_[v] == kBefore) {
    inputs_.assign(reads.begin(), reads.end());
    inputs_.insert(inputs_.end(), values_.rerun_overwrites[v].begin(), values_.rerun_overwrites[v].end());
    return;
  }
  rerun_reads_.clear();
  for (const ValueId x : reads) rerun_reads_.add(x);
  for (const ValueId x : values_.reads[v]) {
    if (!values_.rerunnable(v) || rerun_reads_.has(x)) inputs_.push_back(x);
  }
  const auto& overwritten = values_.rerunnable(v) ? values_.rerun_overwrites[v] : values_.overwrites[v];
  inputs_.insert(inputs_.end(), overwritten.begin(), overwritten.end());
}

void RecomputeBound::select(OpId t) {
  for (const ValueId x : needed_) value_node_[x] = -1;
  for (const OpId v : makers_) op_node_[v] = -1;
  needed_.clear(), makers_.clear(), keep_bytes_.clear();
  side_.assign(graph_.num_ops(), kFree);
  side_[t] = kBefore;  // its results are there once it has run
  mark(t, true);
  mark(t, false);
  for (OpId v = 0; v < graph_.num_ops() && rules_.split > 0; ++v) {  // the second program begins when the first is through
    if ((v < rules_.split) != (t < rules_.split)) side_[v] = v < rules_.split ? kBefore : kAfter;
  }

  constant_ = graph_.resident_bytes() + graph_.workspace(t);
  auto temporary = [&](ValueId x) { return graph_.producer(values_.tensor[x]) != kNoOp; };
  auto bytes = [&](ValueId x) { return graph_.bytes(values_.tensor[x]); };
  std::vector<ValueId> inputs;
  at_hand_.clear();
  for (const auto& list : {values_.reads[t], values_.overwrites[t]}) {
    for (const ValueId x : list) {
      if (graph_.planned(values_.tensor[x]) && at_hand_.add(x)) inputs.push_back(x);
    }
  }
  for (const ValueId x : inputs) constant_ += bytes(x);
  Bytes written = 0;
  for (std::size_t i = 0; i + values_.overwrites[t].size() < values_.makes[t].size(); ++i) written += bytes(values_.makes[t][i]);
  std::vector<ValueId> overwritable(values_.overwrites[t].begin(), values_.overwrites[t].end());
  if (rules_.in_place[t] != 0 && values_.makes[t].size() == 1 && values_.overwrites[t].empty()) {
    for (const ValueId x : inputs) {
      if (temporary(x) && bytes(x) == written) overwritable.push_back(x);
    }
    if (!overwritable.empty()) written = 0;
    if (overwritable.size() > 1) overwritable.clear();  // whichever is needed later, another one could be overwritten
  }
  constant_ += written;
  lost_.clear();
  for (const ValueId x : overwritable) lost_.add(x);

  auto need = [&](ValueId x) {
    const OpId maker = values_.producer[x];
    const bool given = maker == kNoOp && graph_.planned(values_.tensor[x]);  // donated: nothing makes it again
    if (value_node_[x] >= 0 || (!given && (maker == kNoOp || maker == t || side_[maker] == kAfter || !temporary(x)))) return;
    value_node_[x] = 0;
    needed_.push_back(x);
    keep_bytes_.push_back(at_hand_.has(x) && !lost_.has(x) ? 0 : bytes(x));
  };
  for (OpId v = 0; v < graph_.num_ops(); ++v) {
    if (side_[v] != kAfter) continue;
    for (const ValueId x : values_.reads[v]) need(x);
    for (const ValueId x : values_.overwrites[v]) need(x);
  }
  for (ValueId x = 0; x < values_.num_values(); ++x) {
    if (values_.output[x] != 0) need(x);
  }
  num_read_ = needed_.size();
  for (std::size_t i = 0; i < needed_.size(); ++i) {
    const OpId maker = values_.producer[needed_[i]];
    if (maker == kNoOp) continue;
    if (side_[maker] == kBefore && !values_.remade(needed_[i])) continue;  // it can only be kept
    if (op_node_[maker] >= 0) continue;
    op_node_[maker] = 0;
    makers_.push_back(maker);
    find_inputs(maker);
    for (const ValueId x : inputs_) need(x);
  }
}

// Minimises bytes kept + price * seconds added. value: a lower bound on the minimum; the line: bytes and seconds that attain it.
RecomputeBound::Line RecomputeBound::cut(double price, double& value, Control& control) {
  network_.reset();
  for (const ValueId x : needed_) value_node_[x] = network_.add_node();
  for (const OpId v : makers_) op_node_[v] = network_.add_node();
  for (std::size_t i = 0; i < needed_.size(); ++i) {
    const ValueId x = needed_[i];
    const OpId maker = values_.producer[x];
    if (i < num_read_) network_.add_edge(FlowNetwork::kSource, value_node_[x], FlowNetwork::kInfinite);
    const bool can_rerun = maker != kNoOp && op_node_[maker] >= 0 && (side_[maker] == kFree || values_.remade(x));
    const auto capacity = static_cast<Bytes>(kScale) * keep_bytes_[i];
    if (capacity > 0) network_.add_edge(value_node_[x], can_rerun ? op_node_[maker] : FlowNetwork::kSink, capacity);
  }
  for (const OpId v : makers_) {
    if (side_[v] == kBefore) {
      const double cost = std::min(std::floor(price * rules_.rerun_seconds[v] * kScale), static_cast<double>(kMaxCapacity));
      if (cost >= 1) network_.add_edge(op_node_[v], FlowNetwork::kSink, static_cast<Bytes>(cost));
    }
    find_inputs(v);
    for (const ValueId x : inputs_) {
      if (value_node_[x] >= 0) network_.add_edge(op_node_[v], value_node_[x], FlowNetwork::kInfinite);
    }
  }
  value = static_cast<double>(network_.maximise(kMaxBytes, [&] { return control.stop(constant_, constant_); })) / kScale;
  network_.reached({FlowNetwork::kSource}, 0, reached_);
  Line line{0, 0};
  dropped_.clear();
  for (std::size_t i = 0; i < needed_.size(); ++i) {
    const OpId maker = values_.producer[needed_[i]];
    if (reached_[value_node_[needed_[i]]] == 0) continue;
    if (maker == kNoOp || op_node_[maker] < 0 || reached_[op_node_[maker]] == 0) {
      line.bytes += static_cast<double>(keep_bytes_[i]);
    } else {
      dropped_.push_back(needed_[i]);
    }
  }
  for (const OpId v : makers_) {
    if (side_[v] == kBefore && reached_[op_node_[v]] != 0) line.seconds += rules_.rerun_seconds[v];
  }
  return line;
}

// The maximum of objective(cut value, price) over all prices. The cut value is concave in the price, a minimum of lines, so each
// new price is where the two bracketing lines meet. dear(line): whether the best price lies above the one of this line.
template <class Objective, class Dear>
double RecomputeBound::maximise(Objective objective, Dear dear, Control& control) {
  double value = 0;
  Line cheap = cut(0, value, control);  // time costs nothing: the least that must be kept
  double best = objective(value, 0.0);
  Line kept{0, 0};
  cheap_ = dropped_;
  kept_.clear();
  for (std::size_t i = 0; i < num_read_; ++i) kept.bytes += static_cast<double>(keep_bytes_[i]);
  for (int i = 0; i < kMaxCuts && dear(cheap) && cheap.seconds > kept.seconds && kept.bytes > cheap.bytes; ++i) {
    if (control.stop(constant_, constant_)) break;
    const double price = (kept.bytes - cheap.bytes) / (cheap.seconds - kept.seconds);
    const Line line = cut(price, value, control);
    best = std::max(best, objective(value, price));
    if (line.bytes + price * line.seconds >= (kept.bytes + price * kept.seconds) * (1 - kRounding)) break;  // no line between
    (dear(line) ? cheap : kept) = line;
    (dear(line) ? cheap_ : kept_) = dropped_;
  }
  return best;
}

std::vector<ValueId> RecomputeBound::made_again(OpId t, double price, Control& control) {
  select(t);
  double value = 0;
  cut(price, value, control);
  std::vector<ValueId> made = dropped_;
  std::erase_if(made, [&](ValueId x) { return side_[values_.producer[x]] != kBefore; });
  return made;
}

Bytes RecomputeBound::least_peak(OpId t, double added_seconds, Control& control) {
  select(t);
  const double added = added_seconds * (1 + kRounding);
  const double kept = maximise([&](double value, double price) { return price > 0 ? value - price * added : value; },
                               [&](const Line& line) { return line.seconds > added; }, control);
  return constant_ + static_cast<Bytes>(std::floor(std::max(0.0, kept)));
}

double RecomputeBound::least_added_seconds(OpId t, Bytes peak, Control& control) {
  select(t);
  const auto room = static_cast<double>(peak - constant_);
  if (room < 0) return std::numeric_limits<double>::infinity();
  const double added = maximise(
      [&](double value, double price) {
        if (price > 0) return (value - room) / price;
        return value > room ? std::numeric_limits<double>::infinity() : 0.0;
      },
      [&](const Line& line) { return line.bytes <= room; }, control);
  return std::max(0.0, added * (1 - kRounding));
}

}  // namespace olla
