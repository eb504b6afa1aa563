#include "graphs.hpp"
#include "olla/check/check.hpp"
#include "olla/graph/profile.hpp"
#include "test.hpp"

using namespace olla;
using test::data;

namespace {

// A plan that owns its arrays. Everything has bytes of its own in the arena: valid, if wasteful.
struct Plan {
  std::vector<OpId> order, before, after;
  std::vector<Offset> offsets, workspace_offsets;
  Bytes alignment = 8;
  Figures figures{};
  const Graph* given = nullptr;

  PlanView view() const { return {order, offsets, workspace_offsets, alignment, before, after, figures, given}; }
};

Plan order_only(const Graph& graph, std::vector<OpId> order) {
  const Bytes peak = profile(graph, order).peak;
  const Bytes program_peak = profile(graph, test::program_order(graph)).peak;
  Plan plan{.order = std::move(order),
            .offsets = std::vector<Offset>(graph.num_tensors(), kNotInArena),
            .workspace_offsets = std::vector<Offset>(graph.num_ops(), kNotInArena)};
  Bytes donated = 0;
  for (TensorId t = 0; t < graph.num_tensors(); ++t)
    if (graph.data().donated[t] != 0) donated += graph.data().tensor_bytes[t];
  plan.figures = {peak, graph.resident_bytes(), program_peak, graph.resident_bytes(), donated, 0, 0};
  plan.given = &graph;
  return plan;
}

Plan side_by_side(const Graph& graph, std::vector<OpId> order) {
  Plan plan = order_only(graph, std::move(order));
  const Lifetimes lives = lifetimes(graph, plan.order);
  std::vector<Bytes> load(graph.num_ops() + 1, 0);
  auto place = [&plan](Bytes bytes) {
    const Offset offset = plan.figures.arena_bytes;
    plan.figures.arena_bytes += (bytes + plan.alignment - 1) / plan.alignment * plan.alignment;
    return offset;
  };
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.producer(t) == kNoOp) continue;
    plan.offsets[t] = place(graph.bytes(t));
    for (Step s = lives.first[t]; s < lives.last[t]; ++s) load[s] += plan.figures.arena_bytes - plan.offsets[t];
  }
  for (Step s = 0; s < graph.num_ops(); ++s) {
    const OpId v = plan.order[s];
    if (graph.workspace(v) == 0) continue;
    plan.workspace_offsets[v] = place(graph.workspace(v));
    load[s] += plan.figures.arena_bytes - plan.workspace_offsets[v];
  }
  plan.figures.load_bytes = *std::max_element(load.begin(), load.end());
  return plan;
}

// Parameter 0; activations 1 and 2 from ops 0 and 1; op 2 reads both into 3; op 3 mutates the parameter. Op 1 has a workspace.
GraphData step_data() {
  return data({100, 20, 40, 8}, {{.reads = {0}, .writes = {1}},
                                 {.writes = {2}, .workspace = 16},
                                 {.reads = {1, 2}, .writes = {3}},
                                 {.reads = {3}, .mutates = {0}}});
}

std::string rule_of(const Graph& graph, const Plan& plan) {
  try {
    check(graph, plan.view());
  } catch (const PlanError& error) {
    return error.rule();
  }
  return "";
}

// The rule a plan breaks after `change`.
template <class Change>
std::string broken(const Graph& graph, Change change) {
  Plan plan = side_by_side(graph, test::program_order(graph));
  change(plan);
  return rule_of(graph, plan);
}

}  // namespace

TEST(plans_with_and_without_a_layout_are_accepted) {
  const Graph graph(step_data());
  CHECK_EQ(rule_of(graph, side_by_side(graph, {0, 1, 2, 3})), "");
  CHECK_EQ(rule_of(graph, side_by_side(graph, {1, 0, 2, 3})), "");
  CHECK_EQ(rule_of(graph, order_only(graph, {1, 0, 2, 3})), "");
  const Graph empty(data({}, {}));
  CHECK_EQ(rule_of(empty, side_by_side(empty, {})), "");
  const Graph nothing_runs(data({7, 9}, {}, {0}, {1}));
  CHECK_EQ(rule_of(nothing_runs, side_by_side(nothing_runs, {})), "");
}

TEST(what_is_no_permutation_is_named) {
  const Graph graph(step_data());
  CHECK_EQ(broken(graph, [](Plan& p) { p.order.pop_back(); }), "permutation");
  CHECK_EQ(broken(graph, [](Plan& p) { p.order[1] = 0; }), "permutation");
  CHECK_EQ(broken(graph, [](Plan& p) { p.order[1] = 4; }), "permutation");
  CHECK_EQ(broken(graph, [](Plan& p) { p.order[1] = -1; }), "permutation");
}

TEST(every_kind_of_precedence_is_named_with_its_ops) {
  const Graph graph(step_data());
  CHECK_EQ(broken(graph, [](Plan& p) { std::swap(p.order[0], p.order[2]); }), "dependency");
  CHECK_EQ(broken(graph, [](Plan& p) { p.before = {1}, p.after = {0}; }), "extra_precedence");
  CHECK_EQ(broken(graph, [](Plan& p) { p.before = {0}, p.after = {1}; }), "");
  CHECK_EQ(broken(graph, [](Plan& p) { p.before = {0}, p.after = {4}; }), "extra_precedence");
  CHECK_EQ(broken(graph, [](Plan& p) { p.before = {0}; }), "extra_precedence");

  const Graph after(data({}, {{}, {.after = {0}}}));
  CHECK_EQ(broken(after, [](Plan& p) { std::swap(p.order[0], p.order[1]); }), "dependency");
  const Graph random(data({}, {{.random = true}, {}, {.random = true}}));
  CHECK_EQ(broken(random, [](Plan& p) { std::swap(p.order[0], p.order[1]); }), "");
  CHECK_EQ(broken(random, [](Plan& p) { std::swap(p.order[0], p.order[2]); }), "random_order");

  // read, mutate, read, mutate of one parameter
  const Graph mutation(data({10}, {{.reads = {0}}, {.mutates = {0}}, {.reads = {0}}, {.mutates = {0}}}));
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(broken(mutation, [i](Plan& p) { std::swap(p.order[i], p.order[i + 1]); }), "mutation_order");
  }
  try {
    check(mutation, order_only(mutation, {1, 0, 2, 3}).view());
    CHECK(false);
  } catch (const PlanError& error) {
    CHECK_EQ(error.ids(), {0, 1});
  }
}

TEST(a_broken_layout_is_named) {
  const Graph graph(step_data());
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets.pop_back(); }), "offsets_length");
  CHECK_EQ(broken(graph, [](Plan& p) { p.workspace_offsets.push_back(-1); }), "offsets_length");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[1] = -1; }), "missing_offset");
  CHECK_EQ(broken(graph, [](Plan& p) { p.workspace_offsets[1] = -1; }), "missing_offset");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[0] = 0; }), "unplanned_offset");
  CHECK_EQ(broken(graph, [](Plan& p) { p.workspace_offsets[0] = 0; }), "unplanned_offset");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[2] += 4; }), "alignment");
  CHECK_EQ(broken(graph, [](Plan& p) { p.alignment = 0; }), "alignment");
  CHECK_EQ(broken(graph, [](Plan& p) { p.alignment = Bytes{1} << 62; }), "alignment");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[1] = -8; }), "negative_offset");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[1] = p.offsets[2]; }), "overlap");
  CHECK_EQ(broken(graph, [](Plan& p) { p.workspace_offsets[1] = 40, p.figures.arena_bytes = 72; }), "overlap");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.arena_bytes -= 8; }), "arena");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.arena_bytes += 8; }), "arena");
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[1] = std::numeric_limits<Offset>::max() / 8 * 8; }), "arena");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.load_bytes += 1; }), "load");
}

TEST(tensors_that_never_live_together_may_share_bytes) {
  const Graph graph(step_data());  // tensor 3 is written while 1 and 2 live; the workspace of op 1 lives before it
  CHECK_EQ(broken(graph,
                  [](Plan& p) {
                    p.offsets[3] = p.workspace_offsets[1] = 64;
                    p.figures.arena_bytes = 80;
                  }),
           "");
}

TEST(zero_byte_tensors_overlap_with_nothing) {
  const Graph graph(data({0, 8, 0}, {{.writes = {0}}, {.writes = {1}}, {.reads = {0, 1}, .writes = {2}}}));
  CHECK_EQ(broken(graph, [](Plan& p) { p.offsets[0] = p.offsets[2] = 0; }), "");
}

TEST(an_overlap_names_both_tensors_their_lifetimes_and_their_bytes) {
  const Graph graph(step_data());
  Plan plan = side_by_side(graph, {0, 1, 2, 3});
  plan.offsets[2] = 16;
  try {
    check(graph, plan.view());
    CHECK(false);
  } catch (const PlanError& error) {
    CHECK_EQ(
        std::string(error.what()),
        "tensor 1 (steps [0, 3), bytes [0, 24)) and tensor 2 (steps [1, 3), bytes [16, 56)) are live together and share bytes");
    CHECK_EQ(error.ids(), {1, 2});
  }
}

TEST(every_wrong_figure_is_named) {
  const Graph graph(step_data());
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.peak_bytes -= 1; }), "peak");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.program_peak_bytes += 1; }), "program_peak");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.resident_bytes += 1; }), "resident_bytes");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.donated_bytes += 1; }), "donated_bytes");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.lower_bound_bytes = p.figures.peak_bytes; }), "");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.lower_bound_bytes = p.figures.peak_bytes + 1; }), "bound");
  CHECK_EQ(broken(graph, [](Plan& p) { p.figures.lower_bound_bytes = p.figures.resident_bytes - 1; }), "bound");
}

// The checker and the planners derive dependencies and memory apart from each other; here they must agree on everything.
TEST(the_checker_accepts_exactly_the_valid_orders) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const Graph graph(test::random_data(6, seed));
    std::vector<OpId> order = test::program_order(graph);
    const Plan program = order_only(graph, order);
    do {
      if (graph.is_order(order)) {
        CHECK_EQ(rule_of(graph, side_by_side(graph, order)), "");
      } else {
        Plan plan = program;
        plan.order = order;
        const std::string rule = rule_of(graph, plan);
        CHECK(rule == "dependency" || rule == "mutation_order" || rule == "random_order");
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(a_hundred_thousand_ops_are_checked) {
  const Graph graph(test::random_data(100'000, 1));
  CHECK_EQ(rule_of(graph, side_by_side(graph, test::program_order(graph))), "");
}

OLLA_TEST_MAIN
