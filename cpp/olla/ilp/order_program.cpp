#include "olla/ilp/order_program.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "olla/base/lists.hpp"
#include "olla/ilp/tighten.hpp"

namespace olla {
namespace {

constexpr Bytes kLargestCoefficient = Bytes{1} << 26;  // with tolerance 1e-9 still a fifteenth of a unit
constexpr Bytes kCarry = Bytes{1} << 20;               // what one unit of the high row is worth in the low row
constexpr std::int64_t kMaxClosureBytes = std::int64_t{1} << 30;

// The largest size that is not the same constant in every order.
Bytes largest_variable_size(const Graph& graph, const Spans& spans) {
  Bytes largest = 1;
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    const Lifetime widest = widest_lifetime(graph, spans, t), certain = certain_lifetime(graph, spans, t);
    const bool fixed = widest.first == certain.first && widest.last == certain.last;
    if (graph.planned(t) && !fixed) largest = std::max(largest, graph.bytes(t));
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    if (spans.earliest[v] != spans.latest[v]) largest = std::max(largest, graph.workspace(v));
  }
  return largest;
}

bool too_large(const Graph& graph) {
  const std::int64_t n = graph.num_ops();
  return n * (n / 4 + graph.num_tensors() / 8) > kMaxClosureBytes;
}

}  // namespace

// Adds the columns and rows of one program.
class OrderProgramBuilder {
 public:
  OrderProgramBuilder(const Graph& graph, const Closure& closure, OrderProgram& result)
      : graph_(graph), closure_(closure), result_(result), program_(result.program_) {}

  using Outcome = OrderProgram::Outcome;
  Outcome build(Bytes lower_bound, Bytes target, std::int64_t max_nonzeros) {
    add_blocks();
    for (Step s = 0; s + 1 < graph_.num_ops(); ++s) {
      add_one_op_per_step(s);
      if (program_.num_nonzeros() > max_nonzeros) return Outcome::kTooLarge;
    }
    for (OpId b = 0; b < result_.blocks_.size(); ++b) {
      add_precedences(b);
      if (program_.num_nonzeros() > max_nonzeros) return Outcome::kTooLarge;
    }
    find_last_users();
    result_.peak_ = program_.add_column(1.0, 0.0, std::floor(static_cast<double>((target - result_.base_) / result_.unit_)), true);
    const std::vector<Bytes> possible = possible_bytes();
    for (Step s = 0; s < graph_.num_ops(); ++s) {
      if (possible[s] > lower_bound) gather_memory(s);
      if (program_.num_nonzeros() + pending_ > max_nonzeros) return Outcome::kTooLarge;
    }
    add_memory_rows();
    const bool possible_peak = program_.lower[result_.peak_] <= program_.upper[result_.peak_];
    return consistent_ && possible_peak ? Outcome::kBuilt : Outcome::kNoAnswer;
  }

 private:
  Value started(OpId block, Step step) const { return result_.started(block, step); }
  Value has_run(OpId v, Step step) const { return result_.has_run(v, step); }

  void add_blocks() {
    for (OpId b = 0; b < result_.blocks_.size(); ++b) {
      const auto num_columns = static_cast<Column>(result_.windows_.starts[b].size()) - 1;
      result_.first_column_.push_back(program_.num_columns());
      for (Column k = 0; k < num_columns; ++k) {
        const Column column = program_.add_column(0.0, 0.0, 1.0, true);
        const Term rising[] = {{column - 1, 1.0}, {column, -1.0}};
        if (k > 0) program_.add_row(-Program::kInfinity, 0.0, rising);
      }
    }
  }

  void add_one_op_per_step(Step step) {
    Sum sum;
    for (OpId v = 0; v < graph_.num_ops(); ++v) sum.add(has_run(v, step), 1.0);
    const auto terms = terms_of(sum);
    const double left = step + 1 - sum.constant;
    if (!terms.empty()) program_.add_row(left, left, terms);
    if (terms.empty() && left != 0.0) consistent_ = false;
  }

  // Y[b,s] <= Y[a,s - length of a]. Of two rows with the same right side the later one implies the earlier.
  void add_precedences(OpId b) {
    const auto starts = result_.windows_.starts[b];
    for (const OpId a : result_.windows_.preds[b]) {
      for (std::size_t k = 0; k + 1 < starts.size(); ++k) {
        const Value before = started(a, starts[k] - result_.blocks_.length(a));
        if (before.column < 0) continue;
        const Value next = started(a, starts[k + 1] - result_.blocks_.length(a));
        if (k + 2 < starts.size() && next.column == before.column) continue;
        const Term terms[] = {{result_.first_column_[b] + static_cast<Column>(k), 1.0}, {before.column, -1.0}};
        program_.add_row(-Program::kInfinity, 0.0, terms);
      }
    }
  }

  // Of each tensor: the users that no other user certainly follows.
  void find_last_users() {
    std::vector<OpId> list;
    for (TensorId t = 0; t < graph_.num_tensors(); ++t) {
      list.clear();
      if (graph_.planned(t) && !graph_.output(t)) {
        const auto users = graph_.users(t);
        auto follows = [&](OpId u, OpId w) {
          const Blocks& blocks = result_.blocks_;
          return w != u &&
                 (closure_.before.test(w, u) || (blocks.block[u] == blocks.block[w] && blocks.offset[u] < blocks.offset[w]));
        };
        for (const OpId u : users) {
          if (std::none_of(users.rbegin(), users.rend(), [&](OpId w) { return follows(u, w); })) list.push_back(u);
        }
      }
      last_users_.push_back(list);
    }
  }

  // At most so many bytes are live at step s: every tensor that can be, and the largest workspace.
  std::vector<Bytes> possible_bytes() {
    const Step n = graph_.num_ops();
    const Spans& spans = result_.windows_.spans;
    std::vector<Bytes> change(n + 1, 0), workspace(n, 0);
    for (TensorId t = 0; t < graph_.num_tensors(); ++t) {
      const Lifetime widest = widest_.emplace_back(widest_lifetime(graph_, spans, t));
      if (!graph_.planned(t) || widest.first >= widest.last) continue;
      change[widest.first] += graph_.bytes(t);
      change[widest.last] -= graph_.bytes(t);
    }
    for (OpId v = 0; v < n; ++v) {
      if (graph_.workspace(v) == 0) continue;
      for (Step s = spans.earliest[v]; s <= spans.latest[v]; ++s) workspace[s] = std::max(workspace[s], graph_.workspace(v));
    }
    Bytes live = graph_.resident_bytes();
    for (Step s = 0; s < n; ++s) {
      live += change[s];
      change[s] = live + workspace[s];
    }
    return change;
  }

  // The memory row of a step, kept until all D columns are there. certain counts bytes, the sum counts units.
  void gather_memory(Step s) {
    Bytes certain = graph_.resident_bytes() - result_.base_;
    Sum sum;
    for (TensorId t = 0; t < graph_.num_tensors(); ++t) {
      if (!graph_.planned(t) || graph_.bytes(t) == 0 || s < widest_[t].first || s >= widest_[t].last) continue;
      const OpId producer = graph_.producer(t);
      const Value born = producer == kNoOp ? Value{-1, 1.0} : has_run(producer, s);
      add_tensor(born, dead_before(t, s), graph_.bytes(t), certain, sum);
    }
    for (OpId v = 0; v < graph_.num_ops(); ++v) {
      if (graph_.workspace(v) > 0) add_tensor(has_run(v, s), has_run(v, s - 1), graph_.workspace(v), certain, sum);
    }
    // certain may be negative: the shift by base_ is a whole number of units, so that rounding down stays below the true bytes.
    const Bytes unit = result_.unit_;
    const double constant = sum.constant + static_cast<double>(certain >= 0 ? certain / unit : -((unit - 1 - certain) / unit));
    auto terms = terms_of(sum);
    pending_ += terms.empty() ? 0 : std::ssize(terms) + 1;
    if (terms.empty()) {
      program_.lower[result_.peak_] = std::max(program_.lower[result_.peak_], constant);
    } else {
      result_.memory_.push_back({std::move(terms), -constant, -1});
    }
  }

  void add_tensor(Value born, Value dead, Bytes bytes, Bytes& certain, Sum& sum) {
    if (born.column < 0 && dead.column < 0) {
      if (born.constant > dead.constant) certain += bytes;
      return;
    }
    const auto units = static_cast<double>(bytes / result_.unit_);
    sum.add(born, units);
    sum.add(dead, -units);
  }

  Value dead_before(TensorId t, Step s) {
    if (graph_.output(t)) return {-1, 0.0};
    if (graph_.users(t).empty()) return graph_.producer(t) == kNoOp ? Value{-1, 1.0} : has_run(graph_.producer(t), s - 1);
    std::vector<Column> waiting;
    for (const OpId u : last_users_[static_cast<std::size_t>(t)]) {
      const Value done = has_run(u, s - 1);
      if (done.column >= 0) waiting.push_back(done.column);
      if (done.column < 0 && done.constant == 0.0) return {-1, 0.0};
    }
    sort_unique(waiting);
    if (waiting.empty()) return {-1, 1.0};
    if (waiting.size() == 1) return {waiting[0], 0.0};
    const Column column = program_.add_column(0.0, 0.0, 1.0, false);
    for (const Column user : waiting) {
      const Term terms[] = {{column, 1.0}, {user, -1.0}};
      program_.add_row(-Program::kInfinity, 0.0, terms);
    }
    result_.deaths_.push_back({column, std::move(waiting)});
    return {column, 0.0};
  }

  // A row with large coefficients, S = kCarry high + low, becomes two with an integer carry c, which say exactly the same:
  // low terms - peak - kCarry c <= low right, high terms + c <= high right.
  void add_memory_rows() {
    constexpr auto kBase = static_cast<double>(kCarry);
    for (auto& row : result_.memory_) {
      std::vector<Term> low = row.terms, high;
      double low_right = row.right;
      if (result_.split_) {
        double most = 0.0;
        for (Term& term : low) {
          const double carried = std::floor(term.value / kBase);
          if (carried != 0.0) high.push_back({term.column, carried});
          term.value -= kBase * carried;
          most += term.value;
        }
        std::erase_if(low, [](const Term& term) { return term.value == 0.0; });
        const double carried = std::floor(row.right / kBase), range = program_.upper[result_.peak_];
        low_right -= kBase * carried;
        row.carry = program_.add_column(0.0, -std::ceil(range / kBase) - 1.0, std::ceil(most / kBase), true);
        high.push_back({row.carry, 1.0});
        low.push_back({row.carry, -kBase});
        program_.add_row(-Program::kInfinity, carried, high);
      }
      low.push_back({result_.peak_, -1.0});
      program_.add_row(-Program::kInfinity, low_right, low);
    }
  }

  static std::vector<Term> terms_of(const Sum& sum) {
    std::vector<Term> terms = sum.merged();
    std::erase_if(terms, [](const Term& term) { return term.value == 0.0; });
    return terms;
  }

  const Graph& graph_;
  const Closure& closure_;
  OrderProgram& result_;
  Program& program_;
  std::vector<std::vector<OpId>> last_users_;
  std::vector<Lifetime> widest_;
  std::int64_t pending_ = 0;  // entries of the memory rows
  bool consistent_ = true;    // no step needs two ops, or none
};

Bytes peak_grid(const Graph& graph) {
  Bytes divisor = 0;
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.planned(t)) divisor = std::gcd(divisor, graph.bytes(t));
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) divisor = std::gcd(divisor, graph.workspace(v));
  return std::max<Bytes>(divisor, 1);
}

Bytes simple_bound(const Graph& graph) {
  if (too_large(graph)) return graph.resident_bytes();
  return certain_peak(graph, certain_tensors(graph, Closure(graph.preds())));
}

OrderProgram::OrderProgram(const Graph& graph, const OrderProgramOptions& options, const std::function<bool()>& stop) {
  const std::int64_t n = graph.num_ops();
  const Spans widest = spans(graph);
  std::int64_t num_free = 0;  // op and step pairs that precedences leave open
  for (OpId v = 0; v < n; ++v) num_free += widest.latest[v] - widest.earliest[v];
  num_nonzeros_ = 3 * num_free;  // roughly: rising, one per step, precedences
  if (num_free > 8 * options.max_nonzeros || too_large(graph)) {
    outcome_ = Outcome::kTooLarge;
    return;
  }
  outcome_ = Outcome::kNoAnswer;
  const std::optional<Graph> tightened = options.reduce ? tighten(graph, options.target, stop) : graph;
  if (!tightened) return;
  const Closure& closure = closure_.emplace(tightened->preds());
  const Csr<TensorId> certain = certain_tensors(*tightened, closure);
  const Bytes lower_bound = std::max(options.lower_bound, certain_peak(*tightened, certain));
  if (lower_bound > options.target) return;
  blocks_ = options.reduce ? glue(*tightened, closure, options.moves) : singletons(graph);
  auto windows = find_windows(*tightened, closure, blocks_, certain, options.reduce ? options.target : kMaxBytes);
  if (!windows) return;
  windows_ = std::move(*windows);

  const Bytes grid = unit_ = peak_grid(graph);
  const Bytes largest = largest_variable_size(graph, windows_.spans);
  while (largest / unit_ > kLargestCoefficient * (options.split ? kCarry : 1)) unit_ *= 2;
  split_ = largest / unit_ > kLargestCoefficient;
  if (unit_ != grid) rounding_ = unit_ * (graph.num_tensors() + 2);
  const Bytes coefficient = split_ ? std::max(kCarry, largest / unit_ / kCarry) : std::max<Bytes>(largest / unit_, 1);
  tolerance_ = std::clamp(0.05 / static_cast<double>(coefficient), 1e-9, 1e-6);
  base_ = graph.resident_bytes() + (lower_bound - graph.resident_bytes()) / unit_ * unit_;
  outcome_ = OrderProgramBuilder(*tightened, closure, *this).build(lower_bound, options.target, options.max_nonzeros);
  num_nonzeros_ = program_.num_nonzeros();
  if (outcome_ != Outcome::kBuilt) program_ = {};
}

Value OrderProgram::started(OpId block, Step step) const {
  const auto starts = windows_.starts[block];
  const auto reached = std::upper_bound(starts.begin(), starts.end(), step) - starts.begin();
  if (reached == 0) return {-1, 0.0};
  if (reached == static_cast<std::ptrdiff_t>(starts.size())) return {-1, 1.0};
  return {first_column_[block] + static_cast<Column>(reached) - 1, 0.0};
}

std::vector<double> OrderProgram::encode(std::span<const OpId> order) const {
  std::vector<double> values(program_.num_columns(), 0.0);
  const std::vector<OpId> gathered = gather(blocks_, order);
  for (std::size_t s = 0; s < gathered.size(); s += blocks_.members[blocks_.block[gathered[s]]].size()) {
    const OpId b = blocks_.block[gathered[s]];
    const auto starts = windows_.starts[b];
    const auto place = std::lower_bound(starts.begin(), starts.end(), static_cast<Step>(s));
    if (place == starts.end() || *place != static_cast<Step>(s)) return {};
    const auto k = place - starts.begin();
    std::fill(values.begin() + first_column_[b] + k, values.begin() + first_column_[b] + static_cast<Column>(starts.size()) - 1,
              1.0);
  }
  for (const Death& death : deaths_) {
    values[death.column] = 1.0;
    for (const Column user : death.users) values[death.column] = std::min(values[death.column], values[user]);
  }
  double peak = program_.lower[peak_];
  for (const MemoryRow& row : memory_) {
    double live = -row.right;
    for (const Term& term : row.terms) live += term.value * values[term.column];
    peak = std::max(peak, live);
  }
  if (peak > program_.upper[peak_]) return {};
  values[peak_] = peak;
  for (const MemoryRow& row : memory_) {
    if (row.carry < 0) continue;
    constexpr auto kBase = static_cast<double>(kCarry);
    double excess = -peak - (row.right - kBase * std::floor(row.right / kBase));
    for (const Term& term : row.terms) excess += (term.value - kBase * std::floor(term.value / kBase)) * values[term.column];
    values[row.carry] = std::ceil(excess / kBase);
  }
  return values;
}

std::vector<OpId> OrderProgram::decode(std::span<const double> values) const {
  std::vector<std::pair<Step, OpId>> starts;
  for (OpId b = 0; b < blocks_.size(); ++b) {
    std::size_t k = 0;
    while (k + 1 < windows_.starts[b].size() && values[first_column_[b] + k] < 0.5) ++k;
    starts.emplace_back(windows_.starts[b][k], b);
  }
  std::sort(starts.begin(), starts.end());
  std::vector<OpId> order;
  for (const auto& [start, b] : starts) order.insert(order.end(), blocks_.members[b].begin(), blocks_.members[b].end());
  return order;
}

}  // namespace olla
