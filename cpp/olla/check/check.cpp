#include "olla/check/check.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <string>

namespace olla {
namespace {

constexpr Bytes kMaxAlignment = Bytes{1} << 30;  // rounding up every size cannot overflow

[[noreturn]] void fail(const char* rule, const std::string& message, std::vector<std::int64_t> ids = {}) {
  throw PlanError(message, rule, std::move(ids));
}

std::string op(std::int64_t v) { return "op " + std::to_string(v); }
std::string tensor(std::int64_t t) { return "tensor " + std::to_string(t); }
std::string range(std::int64_t first, std::int64_t last) { return "[" + std::to_string(first) + ", " + std::to_string(last) + ")"; }

// Lifetimes as the memory model defines them, for any order that has passed the checks below.
struct Lives {
  std::vector<Step> first, last;
  std::vector<OpId> writer;  // kNoOp if resident
};

// A block of the arena: tensor `id`, or the workspace of op `id`.
struct Block {
  bool workspace;
  std::int64_t id;
  Step first, last;
  Offset offset;
  Bytes size;  // rounded up to the alignment

  std::string name() const { return workspace ? "the workspace of op " + std::to_string(id) : tensor(id); }
  std::string text() const { return name() + " (steps " + range(first, last) + ", bytes " + range(offset, offset + size) + ")"; }
};

std::vector<Step> check_permutation(const Graph& graph, std::span<const OpId> order) {
  const OpId num_ops = graph.num_ops();
  if (order.size() != static_cast<std::size_t>(num_ops)) {
    fail("permutation", "the order names " + std::to_string(order.size()) + " ops, but the graph has " + std::to_string(num_ops));
  }
  std::vector<Step> step(num_ops, -1);
  for (Step s = 0; s < num_ops; ++s) {
    const OpId v = order[s];
    if (v < 0 || v >= num_ops) {
      fail("permutation",
           "step " + std::to_string(s) + " runs " + op(v) + ", but the graph has ops 0 to " + std::to_string(num_ops - 1), {v});
    }
    if (step[v] >= 0) {
      fail("permutation", op(v) + " runs twice, at steps " + std::to_string(step[v]) + " and " + std::to_string(s), {v});
    }
    step[v] = s;
  }
  return step;
}

// Every rule of precedence, from the lists alone. Walking the ops in program order, `latest` remembers per tensor which earlier use
// (which earlier mutation) the plan runs last: that one decides.
void check_precedences(const Graph& graph, const PlanView& plan, const std::vector<Step>& step, const std::vector<OpId>& writer) {
  const GraphData& d = graph.data();
  auto require = [&step](OpId before, OpId after, const char* rule, const std::string& reason) {
    if (before == kNoOp || step[before] <= step[after]) return;
    fail(rule,
         op(after) + " runs at step " + std::to_string(step[after]) + ", before " + op(before) + " at step " +
             std::to_string(step[before]) + ", but " + reason,
         {before, after});
  };
  auto keep_latest = [&step](OpId& latest, OpId v) {
    if (latest == kNoOp || step[v] > step[latest]) latest = v;
  };
  std::vector<OpId> latest_use(graph.num_tensors(), kNoOp), latest_mutation(graph.num_tensors(), kNoOp);
  OpId last_random = kNoOp;
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    for (const auto uses : {d.reads[v], d.mutates[v]}) {
      for (const TensorId t : uses) {
        require(writer[t], v, "dependency", "it uses " + tensor(t) + ", which that op writes");
        require(latest_mutation[t], v, "mutation_order", "that op mutates " + tensor(t) + " earlier in the program");
      }
    }
    for (const TensorId t : d.mutates[v]) {
      require(latest_use[t], v, "mutation_order", "it mutates " + tensor(t) + ", which that op uses earlier in the program");
    }
    for (const TensorId t : d.reads[v]) keep_latest(latest_use[t], v);
    for (const TensorId t : d.mutates[v]) keep_latest(latest_use[t], v);
    for (const TensorId t : d.mutates[v]) keep_latest(latest_mutation[t], v);
    for (const OpId u : d.after[v]) require(u, v, "dependency", "the graph lists it after that op");
    if (d.random[v] == 0) continue;
    require(last_random, v, "random_order", "random ops keep their program order");
    last_random = v;
  }
  if (plan.before.size() != plan.after.size()) {
    fail("extra_precedence", "there are " + std::to_string(plan.before.size()) + " beginnings of extra precedences and " +
                                 std::to_string(plan.after.size()) + " ends");
  }
  for (std::size_t i = 0; i < plan.before.size(); ++i) {
    const OpId u = plan.before[i], v = plan.after[i];
    if (std::min(u, v) < 0 || std::max(u, v) >= graph.num_ops() || u == v) {
      fail("extra_precedence",
           "extra precedence " + std::to_string(i) + " is " + op(u) + " before " + op(v) + ": expected two different ops below " +
               std::to_string(graph.num_ops()),
           {u, v});
    }
    require(u, v, "extra_precedence", "an extra precedence says otherwise");
  }
}

Lives lives_of(const Graph& graph, const std::vector<Step>& step, const std::vector<OpId>& writer) {
  const GraphData& d = graph.data();
  Lives lives{std::vector<Step>(graph.num_tensors(), 0), std::vector<Step>(graph.num_tensors(), 0), writer};
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (writer[t] != kNoOp) {
      lives.first[t] = step[writer[t]];
      lives.last[t] = step[writer[t]] + 1;  // a tensor nobody reads is live during its own op
    } else if (d.donated[t] == 0) {
      lives.last[t] = graph.num_ops();
    }
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    for (const auto uses : {d.reads[v], d.mutates[v]}) {
      for (const TensorId t : uses) lives.last[t] = std::max(lives.last[t], step[v] + 1);
    }
  }
  for (const TensorId t : d.outputs) lives.last[t] = graph.num_ops();
  return lives;
}

Bytes max_prefix_sum(const std::vector<Bytes>& change) {
  Bytes sum = 0, best = 0;
  for (const Bytes c : change) best = std::max(best, sum += c);
  return best;
}

std::vector<OpId> writers_of(const Graph& graph) {
  std::vector<OpId> writer(graph.num_tensors(), kNoOp);
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    for (const TensorId t : graph.data().writes[v]) writer[t] = v;
  }
  return writer;
}

// Bytes of the tensors that no op writes: the donated ones, or those resident throughout.
Bytes given_bytes(const Graph& graph, const std::vector<OpId>& writer, bool donated) {
  Bytes sum = 0;
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (writer[t] == kNoOp && (graph.data().donated[t] != 0) == donated) sum += graph.data().tensor_bytes[t];
  }
  return sum;
}

Bytes peak_of(const Graph& graph, const std::vector<Step>& step, const std::vector<OpId>& writer) {
  const Lives lives = lives_of(graph, step, writer);
  std::vector<Bytes> change(graph.num_ops() + 1, 0);
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (writer[t] == kNoOp && graph.data().donated[t] == 0) continue;
    change[lives.first[t]] += graph.data().tensor_bytes[t];
    change[lives.last[t]] -= graph.data().tensor_bytes[t];
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    change[step[v]] += graph.data().workspace_bytes[v];
    change[step[v] + 1] -= graph.data().workspace_bytes[v];
  }
  return given_bytes(graph, writer, false) + max_prefix_sum(change);
}

bool has_layout(const PlanView& plan) {
  auto set = [](Offset offset) { return offset != kNotInArena; };
  return plan.figures.arena_bytes != 0 || plan.figures.load_bytes != 0 ||
         std::any_of(plan.offsets.begin(), plan.offsets.end(), set) ||
         std::any_of(plan.workspace_offsets.begin(), plan.workspace_offsets.end(), set);
}

// What must be in the arena: every tensor an op writes, and every workspace. Nothing else may be.
std::vector<Block> check_offsets(const Graph& graph, const PlanView& plan, const Lives& lives, const std::vector<Step>& step) {
  std::vector<Block> blocks;
  auto add = [&](Block b, bool planned, const char* kind, Bytes bytes) {
    if (b.offset < kNotInArena) fail("negative_offset", b.name() + " has offset " + std::to_string(b.offset), {b.id});
    if (!planned && b.offset == kNotInArena) return;
    if (!planned) fail("unplanned_offset", b.name() + " has offset " + std::to_string(b.offset) + ", but " + kind, {b.id});
    if (b.offset == kNotInArena) fail("missing_offset", b.name() + " has no offset, but the plan lays out the others", {b.id});
    if (b.offset % plan.alignment != 0) {
      fail("alignment", b.name() + " has offset " + std::to_string(b.offset) + ", no multiple of " + std::to_string(plan.alignment),
           {b.id});
    }
    b.size = (bytes + plan.alignment - 1) / plan.alignment * plan.alignment;
    blocks.push_back(b);
  };
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    add({false, t, lives.first[t], lives.last[t], plan.offsets[t], 0}, lives.writer[t] != kNoOp,
        "no op writes it: it keeps its own storage", graph.data().tensor_bytes[t]);
  }
  for (OpId v = 0; v < graph.num_ops(); ++v) {
    const Bytes bytes = graph.data().workspace_bytes[v];
    add({true, v, step[v], step[v] + 1, plan.workspace_offsets[v], 0}, bytes > 0, "that op has none", bytes);
  }
  return blocks;
}

void check_arena(const std::vector<Block>& blocks, Bytes arena_bytes) {
  Bytes highest = 0;
  for (const Block& b : blocks) {
    if (b.size > arena_bytes || b.offset > arena_bytes - b.size) {
      fail("arena",
           b.name() + " takes " + std::to_string(b.size) + " bytes from offset " + std::to_string(b.offset) +
               ", beyond the arena of " + std::to_string(arena_bytes) + " bytes",
           {b.id});
    }
    highest = std::max(highest, b.offset + b.size);
  }
  if (arena_bytes != highest) {
    fail("arena", "arena_bytes is " + std::to_string(arena_bytes) + ", but the highest block ends at " + std::to_string(highest));
  }
}

// Sweeps over the steps with the blocks alive at the time, ordered by offset: a new block may touch neither neighbour.
void check_overlaps(const std::vector<Block>& blocks, Step num_steps) {
  std::vector<std::vector<std::size_t>> begins(num_steps + 1), ends(num_steps + 1);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].size == 0) continue;
    begins[blocks[i].first].push_back(i);
    ends[blocks[i].last].push_back(i);
  }
  auto clash = [](const Block& a, const Block& b) {
    fail("overlap", a.text() + " and " + b.text() + " are live together and share bytes", {a.id, b.id});
  };
  std::map<Offset, const Block*> alive;
  for (Step s = 0; s < num_steps; ++s) {
    for (const std::size_t i : ends[s]) alive.erase(blocks[i].offset);
    for (const std::size_t i : begins[s]) {
      const Block& b = blocks[i];
      const auto above = alive.lower_bound(b.offset);
      if (above != alive.end() && above->first < b.offset + b.size) clash(*above->second, b);
      if (above != alive.begin()) {
        const Block& below = *std::prev(above)->second;
        if (below.offset + below.size > b.offset) clash(below, b);
      }
      alive.emplace_hint(above, b.offset, &b);
    }
  }
}

void require_figure(const char* rule, const char* figure, Bytes reported, Bytes found) {
  if (reported == found) return;
  fail(rule, std::string(figure) + " is reported as " + std::to_string(reported) + ", but it is " + std::to_string(found));
}

Bytes load_of(const std::vector<Block>& blocks, Step num_steps) {
  std::vector<Bytes> change(num_steps + 1, 0);
  for (const Block& b : blocks) {
    change[b.first] += b.size;
    change[b.last] -= b.size;
  }
  return max_prefix_sum(change);
}

void check_layout(const Graph& graph, const PlanView& plan, const Lives& lives, const std::vector<Step>& step) {
  auto require_length = [](const char* what, std::size_t seen, std::int32_t expected) {
    if (seen == static_cast<std::size_t>(expected)) return;
    fail("offsets_length", std::string(what) + " has " + std::to_string(seen) + " entries, expected " + std::to_string(expected));
  };
  require_length("offsets", plan.offsets.size(), graph.num_tensors());
  require_length("workspace_offsets", plan.workspace_offsets.size(), graph.num_ops());
  if (plan.alignment < 1 || plan.alignment > kMaxAlignment) {
    fail("alignment", "the alignment is " + std::to_string(plan.alignment) + " bytes, expected 1 to 2^30");
  }
  if (!has_layout(plan)) return;
  const std::vector<Block> blocks = check_offsets(graph, plan, lives, step);
  check_arena(blocks, plan.figures.arena_bytes);
  check_overlaps(blocks, graph.num_ops());
  require_figure("load", "load_bytes", plan.figures.load_bytes, load_of(blocks, graph.num_ops()));
}

}  // namespace

void check(const Graph& graph, const PlanView& plan) {
  const std::vector<OpId> writer = writers_of(graph);
  const std::vector<Step> step = check_permutation(graph, plan.order);
  check_precedences(graph, plan, step, writer);
  check_layout(graph, plan, lives_of(graph, step, writer), step);

  const Figures& f = plan.figures;
  require_figure("resident_bytes", "resident_bytes", f.resident_bytes, given_bytes(graph, writer, false));
  require_figure("donated_bytes", "donated_bytes", f.donated_bytes, given_bytes(graph, writer, true));
  require_figure("peak", "peak_bytes", f.peak_bytes, peak_of(graph, step, writer));
  if (plan.given != nullptr) {
    std::vector<Step> program_step(plan.given->num_ops());
    std::iota(program_step.begin(), program_step.end(), 0);
    const Bytes program_peak = peak_of(*plan.given, program_step, writers_of(*plan.given));
    require_figure("program_peak", "program_peak_bytes", f.program_peak_bytes, program_peak);
  }
  if (f.lower_bound_bytes > f.peak_bytes || f.lower_bound_bytes < f.resident_bytes) {
    fail("bound", "lower_bound_bytes is " + std::to_string(f.lower_bound_bytes) + ", expected at least the resident memory (" +
                      std::to_string(f.resident_bytes) + ") and at most the peak (" + std::to_string(f.peak_bytes) + ")");
  }
}

}  // namespace olla
