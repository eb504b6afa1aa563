#include "olla/order/out_tree.hpp"

#include <algorithm>

#include "olla/base/lists.hpp"

namespace olla {
namespace {

struct Child {
  OpId op;
  Bytes hill, kept;  // of the op alone
  const OutTree* tree;
};

// The least memory that a child's tree can reach within a budget of its own.
Bytes least_level(const Child& child, Bytes budget) {
  const auto& least = child.tree->least;
  const auto behind = std::ranges::upper_bound(least, budget, {}, &std::pair<Bytes, Bytes>::first);
  return behind == least.begin() ? child.kept : std::prev(behind)->second;
}

// The bound of a fork: its children's trees beside the tensor of `shared` bytes that the first op of each reads. Until the last
// child has read it, each may go as far as the budget allows beside the tensor alone; then all go on as far as the budget allows.
class LeastOfFork {
 public:
  LeastOfFork(const std::vector<Child>& children, Bytes shared)
      : children_(children), shared_(shared), early_(children.size()), level_(children.size()), done_(children.size()) {}

  // Whether all children can start within the budget. Then level() is the least memory reachable; whole(): all can finish.
  bool reach(Bytes budget) {
    level_sum_ = kMaxBytes;
    whole_ = false;
    Bytes early = 0;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      if (shared_ + children_[i].hill > budget) return false;
      early += early_[i] = least_level(children_[i], budget - shared_);
    }
    bool any = false;
    constexpr std::size_t kFew = 8;
    for (std::size_t last = 0; last < children_.size(); ++last) {
      if (shared_ + early - early_[last] + children_[last].hill > budget) continue;
      any = true;
      go_on(budget, children_.size() <= kFew ? last : children_.size());
      if (children_.size() > kFew) break;  // a relaxation: as if none had to read last
    }
    return any;
  }
  Bytes level() const { return level_sum_; }
  bool whole() const { return whole_; }

 private:
  void go_on(Bytes budget, std::size_t last) {
    Bytes sum = 0;
    for (std::size_t i = 0; i < children_.size(); ++i) {
      sum += level_[i] = i == last ? children_[i].kept : early_[i];
      done_[i] = i != last && children_[i].tree->least_whole <= budget - shared_ ? 1 : 0;
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t i = 0; i < children_.size(); ++i) {
        if (done_[i] != 0) continue;
        const Bytes left = budget - (sum - level_[i]);
        const Bytes now = std::min(level_[i], least_level(children_[i], left));
        done_[i] = children_[i].tree->least_whole <= left ? 1 : 0;
        changed = changed || now < level_[i] || done_[i] != 0;
        sum += now - level_[i];
        level_[i] = now;
      }
    }
    level_sum_ = std::min(level_sum_, sum);
    whole_ = whole_ || std::ranges::all_of(done_, [](std::uint8_t done) { return done != 0; });
  }

  const std::vector<Child>& children_;
  Bytes shared_;
  std::vector<Bytes> early_, level_;
  std::vector<std::uint8_t> done_;
  Bytes level_sum_ = 0;
  bool whole_ = false;
};

// The least budget in (lo, hi] that is enough; hi is.
template <class Enough>
Bytes least_enough(Bytes lo, Bytes hi, Enough enough) {
  while (hi - lo > 1) {
    const Bytes middle = lo + (hi - lo) / 2;
    (enough(middle) ? hi : lo) = middle;
  }
  return hi;
}

Bytes highest(std::span<const Segment> segments, Bytes level) {
  Bytes most = level;
  for (const Segment& segment : segments) {
    most = std::max(most, level + segment.hill);
    level += segment.rise;
  }
  return most;
}

// The children in a greedy order for a budget, `last` the last one to read the tensor.
std::vector<Segment> greedy(const std::vector<Child>& children, Bytes shared, Bytes budget, std::size_t last) {
  std::vector<Segment> moves, rest;
  std::vector<std::size_t> partly;
  const auto append = [&](const Child& c) { moves.push_back({c.hill, c.kept, c.op, c.op}); };
  for (std::size_t i = 0; i < children.size(); ++i) {
    const Child& c = children[i];
    if (i == last) continue;
    if (shared + c.tree->whole > budget) {
      partly.push_back(i);
      continue;
    }
    append(c);
    moves.insert(moves.end(), c.tree->segments.begin(), c.tree->segments.end());
  }
  const auto fall = [&](std::size_t i) {  // how far memory falls after the child's hill within the budget
    Bytes level = children[i].kept, hill = children[i].hill;
    for (const Segment& segment : children[i].tree->segments) {
      if (shared + level + segment.hill > budget) break;
      hill = std::max(hill, level + segment.hill);
      level += segment.rise;
    }
    return hill - level;
  };
  std::ranges::stable_sort(partly, std::ranges::greater(), fall);
  Bytes level = shared;
  for (const std::size_t i : partly) {
    append(children[i]);
    level += children[i].kept;
    auto segment = children[i].tree->segments.begin();
    const auto end = children[i].tree->segments.end();
    for (; segment != end && level + segment->hill <= budget; ++segment) {
      moves.push_back(*segment);
      level += segment->rise;
    }
    rest.insert(rest.end(), segment, end);
  }
  append(children[last]);
  moves.back().rise -= shared;
  rest.insert(rest.end(), children[last].tree->segments.begin(), children[last].tree->segments.end());
  std::ranges::stable_sort(rest, JohnsonOrder());
  moves.insert(moves.end(), rest.begin(), rest.end());
  return moves;
}

// The budget needed until memory first falls below that of the tensor; of all moves, if it never does.
Bytes budget_to_fall(std::span<const Segment> moves, Bytes shared) {
  Bytes most = shared, level = shared;
  for (const Segment& segment : moves) {
    most = std::max(most, level + segment.hill);
    level += segment.rise;
    if (level < shared) break;
  }
  return most;
}

// Children that may be worth reading the tensor last.
std::vector<std::size_t> last_readers(const std::vector<Child>& children) {
  std::vector<std::size_t> found;
  const auto add = [&](auto key) {
    found.push_back(static_cast<std::size_t>(std::ranges::max_element(children, {}, key) - children.begin()));
  };
  add([](const Child& c) { return c.tree->whole; });
  add([](const Child& c) { return c.kept; });
  add([](const Child& c) { return c.tree->whole - c.hill; });
  add([](const Child& c) { return c.kept - c.hill; });
  sort_unique(found);
  return found;
}

// The greedy order of least budget until memory falls below the tensor's; if it needs more later, the one of least total budget
// where that is less. `fall` and `whole` are lower bounds on the two budgets.
std::vector<Segment> best_greedy(const std::vector<Child>& children, Bytes shared, Bytes fall, Bytes whole) {
  const std::vector<std::size_t> last_ones = last_readers(children);
  const auto search = [&](Bytes least, auto needed) {
    std::vector<Segment> best = greedy(children, shared, kMaxBytes, last_ones.front());
    const auto enough = [&](Bytes budget) {
      for (const std::size_t last : last_ones) {
        std::vector<Segment> moves = greedy(children, shared, budget, last);
        if (needed(moves) < needed(best)) best = std::move(moves);
        if (needed(best) <= budget) return true;
      }
      return false;
    };
    if (!enough(least)) least_enough(least, needed(best), enough);
    return best;
  };
  std::vector<Segment> soon = search(fall, [&](const auto& moves) { return budget_to_fall(moves, shared); });
  if (highest(soon, shared) <= whole) return soon;
  std::vector<Segment> low = search(whole, [&](const auto& moves) { return highest(moves, shared); });
  return highest(soon, shared) <= highest(low, shared) ? soon : low;
}

}  // namespace

OutTrees::OutTrees(const Graph& graph, const Precedences& known, std::vector<OpId>& next)
    : graph_(graph),
      known_(known),
      next_(next),
      succs_(transposed(known.preds, graph.num_ops())),
      trees_(graph.num_ops()),
      leads_(graph.num_ops(), 0),
      inner_(graph.num_ops(), 0) {
  const std::vector<OpId> order = topological_order(known.preds, succs_);
  for (auto v = order.rbegin(); v != order.rend(); ++v) {
    if (!leads(*v)) continue;
    leads_[*v] = 1;
    if (succs_[*v].size() == 1) chain(*v, succs_[*v].front());
    if (succs_[*v].size() > 1) fork(*v);
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    inner_[v] = known.preds[v].size() == 1 ? leads_[known.preds[v].front()] : 0;
    if (leads_[v] != 0 && inner_[v] == 0 && !succs_[v].empty()) roots_.push_back(v);
  }
}

// Whether v roots such a tree: every tensor it writes is read by all its successors or by none and is no output, and the
// successors root such trees too.
bool OutTrees::leads(OpId v) const {
  const auto readers = succs_[v];
  if (!std::ranges::all_of(readers, [&](OpId w) { return leads_[w] != 0 && inside(w); })) return false;
  return std::ranges::all_of(graph_.writes(v), [&](TensorId t) {
    return !graph_.output(t) && (graph_.users(t).empty() || std::ranges::equal(graph_.users(t), readers));
  });
}

// Whether op v has one predecessor only, and uses no planned tensor but that one's.
bool OutTrees::inside(OpId v) const {
  return known_.preds[v].size() == 1 && std::ranges::all_of(graph_.uses(v), [&](TensorId t) {
           return !graph_.planned(t) || graph_.producer(t) == known_.preds[v].front();
         });
}

Bytes OutTrees::kept(OpId v) const {  // of what v makes, once it has run
  Bytes bytes = 0;
  for (const TensorId t : graph_.writes(v)) bytes += graph_.users(t).empty() ? 0 : graph_.bytes(t);
  return bytes;
}

std::vector<Segment> OutTrees::least_segments(OpId root) const {
  std::vector<Segment> segments;
  Bytes level = kept(root);
  for (const auto& [budget, reached] : trees_[root].least) {
    segments.push_back({budget - level, reached - level});
    level = reached;
  }
  segments.push_back({std::max<Bytes>(0, trees_[root].least_whole - level), -level});
  return segments;
}

void OutTrees::chain(OpId v, OpId child) {
  OutTree& tree = trees_[v];
  const Bytes mine = kept(v), hill = graph_.new_bytes(child) + graph_.workspace(child), behind = kept(child);
  tree = std::move(trees_[child]);
  tree.segments.insert(tree.segments.begin(), {hill, behind - mine, child, child});
  tree.segments = canonical(tree.segments, next_);
  const Bytes begin = mine + hill;
  tree.whole = std::max(begin, tree.whole);
  tree.least_whole = std::max(begin, tree.least_whole);
  std::vector<std::pair<Bytes, Bytes>> least;
  const auto lower = [&](Bytes budget, Bytes level) {
    if (level >= (least.empty() ? mine : least.back().second)) return;
    if (!least.empty() && least.back().first == budget)
      least.back().second = level;
    else
      least.emplace_back(budget, level);
  };
  lower(begin, behind);
  for (const auto& [budget, level] : tree.least) lower(std::max(begin, budget), level);
  tree.least = std::move(least);
}

void OutTrees::fork(OpId v) {
  const Bytes shared = kept(v);
  std::vector<Child> children;
  for (const OpId w : succs_[v]) {
    OutTree& tree = trees_[w];
    const Bytes hill = graph_.new_bytes(w) + graph_.workspace(w);
    tree.whole = std::max(hill, tree.whole);
    tree.least_whole = std::max(hill, tree.least_whole);
    children.push_back({w, hill, kept(w), &tree});
  }
  LeastOfFork fork(children, shared);
  const auto whole = [&](Bytes budget) { return fork.reach(budget) && fork.whole(); };
  Bytes enough = shared;
  for (const Child& c : children) enough += c.tree->least_whole + c.kept;
  OutTree tree;
  tree.least_whole = least_enough(shared - 1, enough, whole);
  Bytes level = shared, budget = shared - 1;
  while (level > 0 && budget < tree.least_whole) {
    budget = least_enough(budget, tree.least_whole, [&](Bytes b) { return fork.reach(b) && fork.level() < level; });
    fork.reach(budget);
    level = fork.level();
    tree.least.emplace_back(budget, level);
  }
  const std::vector<Segment> moves =
      best_greedy(children, shared, tree.least.empty() ? tree.least_whole : tree.least.front().first, tree.least_whole);
  tree.whole = highest(moves, shared);
  tree.segments = canonical(moves, next_);
  for (const OpId w : succs_[v]) trees_[w] = {};
  trees_[v] = std::move(tree);
}

}  // namespace olla
