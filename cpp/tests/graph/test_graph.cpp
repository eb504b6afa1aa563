#include <set>

#include "graphs.hpp"
#include "olla/graph/graph.hpp"
#include "test.hpp"

using namespace olla;
using test::data;
using test::Op;
using Ids = std::vector<std::int64_t>;
using List = std::vector<std::int32_t>;

namespace {

List list(std::span<const std::int32_t> ids) { return {ids.begin(), ids.end()}; }

template <class Build>
Ids ids_of_error(Build build) {
  try {
    build();
  } catch (const GraphError& error) {
    return error.ids();
  }
  return {-99};
}

// Dependencies straight from the definition, two ops at a time.
std::set<Edge> expected_closure(const GraphData& d) {
  const OpId n = static_cast<OpId>(d.workspace_bytes.size());
  auto has = [](std::span<const std::int32_t> ids, std::int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
  std::set<Edge> closure;
  for (OpId u = 0; u < n; ++u) {
    for (OpId v = u + 1; v < n; ++v) {
      bool depends = has(d.after[v], u) || (d.random[u] && d.random[v]);
      for (TensorId t = 0; t < static_cast<TensorId>(d.tensor_bytes.size()); ++t) {
        const bool used = has(d.reads[v], t) || has(d.mutates[v], t);
        depends =
            depends || (used && (has(d.writes[u], t) || has(d.mutates[u], t))) || (has(d.reads[u], t) && has(d.mutates[v], t));
      }
      if (depends) closure.emplace(u, v);
    }
  }
  for (OpId middle = 0; middle < n; ++middle) {
    for (OpId u = 0; u < middle; ++u) {
      for (OpId v = middle + 1; v < n; ++v) {
        if (closure.contains({u, middle}) && closure.contains({middle, v})) closure.emplace(u, v);
      }
    }
  }
  return closure;
}

}  // namespace

TEST(empty_graph_is_valid) {
  const Graph graph(data({}, {}));
  CHECK_EQ(graph.num_ops(), 0);
  CHECK_EQ(graph.resident_bytes(), 0);
  CHECK(graph.is_order({}));
}

TEST(ops_without_tensors_and_tensors_without_ops_are_valid) {
  const Graph graph(data({0, 7}, {Op{}, Op{}}));
  CHECK_EQ(graph.resident_bytes(), 7);
  CHECK(graph.preds(1).empty());
}

TEST(a_read_comes_after_the_write) {
  const Graph graph(data({4, 4}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}}));
  CHECK_EQ(list(graph.preds(1)), {0});
  CHECK_EQ(list(graph.succs(0)), {1});
  CHECK_EQ(graph.producer(1), 1);
}

TEST(a_mutation_comes_after_earlier_uses_and_before_later_ones) {
  const Graph graph(data({4}, {{.reads = {0}}, {.reads = {0}}, {.mutates = {0}}, {.reads = {0}}, {.mutates = {0}}}));
  CHECK(graph.preds(1).empty());
  CHECK_EQ(list(graph.preds(2)), {0, 1});
  CHECK_EQ(list(graph.preds(3)), {2});
  CHECK_EQ(list(graph.preds(4)), {2, 3});
}

TEST(random_ops_keep_their_program_order) {
  const Graph graph(data({}, {{.random = true}, {}, {.random = true}, {.random = true}}));
  CHECK_EQ(list(graph.preds(2)), {0});
  CHECK_EQ(list(graph.preds(3)), {2});
}

TEST(repeated_ids_count_once) {
  const Graph graph(data({4, 6}, {{.writes = {0, 1, 0}}, {.reads = {0, 0}, .mutates = {0}, .after = {0, 0}}}, {1, 1}));
  CHECK_EQ(list(graph.writes(0)), {0, 1});
  CHECK_EQ(list(graph.uses(1)), {0});
  CHECK_EQ(list(graph.users(0)), {1});
  CHECK_EQ(list(graph.preds(1)), {0});
  CHECK_EQ(graph.new_bytes(0), 10);
}

TEST(resident_bytes_leave_out_donated_and_written_tensors) {
  const Graph graph(data({1, 2, 4}, {{.reads = {1}, .writes = {2}}}, {}, {1}));
  CHECK_EQ(graph.resident_bytes(), 1);
  CHECK(graph.planned(1) && graph.planned(2) && !graph.planned(0));
}

TEST(dependencies_equal_the_definition_on_random_graphs) {
  for (std::uint32_t seed = 0; seed < 500; ++seed) {
    const GraphData d = test::random_data(8, seed);
    const Graph graph(d);
    std::set<Edge> closure;
    for (OpId v = 0; v < graph.num_ops(); ++v) {
      for (const OpId u : graph.preds(v)) {
        closure.emplace(u, v);
        for (OpId a = 0; a < u; ++a) {
          if (closure.contains({a, u})) closure.emplace(a, v);
        }
      }
    }
    CHECK(closure == expected_closure(d));
  }
}

TEST(unknown_ids_are_rejected) {
  CHECK_THROWS(Graph(data({4}, {{.reads = {1}}})), GraphError, "ids");
  CHECK_THROWS(Graph(data({4}, {{.writes = {-1}}})), GraphError, "ids");
  CHECK_THROWS(Graph(data({}, {{.mutates = {0}}})), GraphError, "ids");
  CHECK_THROWS(Graph(data({4}, {{.after = {1}}})), GraphError, "ids");
  CHECK_THROWS(Graph(data({4}, {}, {1})), GraphError, "ids");
  CHECK_EQ(ids_of_error([] { Graph(data({4}, {{}, {.reads = {0, 7}}})); }), Ids{1, 7});
}

TEST(two_writers_are_rejected_with_tensor_and_ops_named) {
  CHECK_THROWS(Graph(data({4}, {{.writes = {0}}, {.writes = {0}}})), GraphError, "two_writers");
  CHECK_EQ(ids_of_error([] { Graph(data({4}, {{.writes = {0}}, {.writes = {0}}})); }), Ids{0, 0, 1});
}

TEST(a_donated_tensor_cannot_be_written) {
  CHECK_THROWS(Graph(data({4}, {{.writes = {0}}}, {}, {0})), GraphError, "writes_donated");
}

TEST(a_cycle_is_rejected_with_its_ops_named) {
  const auto cyclic =
      data({1, 1, 1}, {{}, {.reads = {2}, .writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}, .writes = {2}}});
  CHECK_THROWS(Graph(cyclic), GraphError, "cycle");
  CHECK_EQ(ids_of_error([&] { Graph graph(cyclic); }), Ids{1, 2, 3});
  CHECK_THROWS(Graph(data({1}, {{.reads = {0}, .writes = {0}}})), GraphError, "cycle");
  CHECK_THROWS(Graph(data({}, {{.after = {0}}})), GraphError, "cycle");
}

TEST(a_program_order_that_breaks_a_dependency_is_rejected) {
  CHECK_THROWS(Graph(data({4}, {{.reads = {0}}, {.writes = {0}}})), GraphError, "program_order");
  CHECK_THROWS(Graph(data({}, {{.after = {1}}, {}})), GraphError, "program_order");
}

TEST(negative_and_overflowing_sizes_are_rejected) {
  CHECK_THROWS(Graph(data({-1}, {})), GraphError, "sizes");
  CHECK_THROWS(Graph(data({}, {{.workspace = -1}})), GraphError, "sizes");
  CHECK_THROWS(Graph(data({kMaxBytes, 1}, {})), GraphError, "sizes");
  CHECK_THROWS(Graph(data({kMaxBytes}, {{.workspace = 1}})), GraphError, "sizes");
  CHECK_EQ(Graph(data({kMaxBytes}, {})).resident_bytes(), kMaxBytes);
}

TEST(lists_that_do_not_fit_are_rejected) {
  GraphData d = data({4}, {{.reads = {0}}});
  for (const std::vector<std::int64_t>& offset : {Ids{}, Ids{0}, Ids{0, 1, 1}, Ids{0, 2}, Ids{1, 1}, Ids{0, 0}, Ids{0, -1}}) {
    d.reads.offset = offset;
    CHECK_THROWS(Graph(d), GraphError, "lengths");
  }
  GraphData falling = data({4}, {{.reads = {0}}, {}});
  falling.reads.offset = {0, 1000000, 1};
  CHECK_THROWS(Graph(falling), GraphError, "lengths");
  GraphData short_of_flags = data({4}, {{}});
  short_of_flags.random.clear();
  CHECK_THROWS(Graph(short_of_flags), GraphError, "lengths");
}

TEST(random_lists_give_a_graph_or_an_error) {
  std::mt19937_64 random(1);
  int num_valid = 0;
  for (int i = 0; i < 20000; ++i) {
    GraphData d = test::random_data(4, static_cast<std::uint32_t>(i));
    Csr<std::int32_t>* lists[] = {&d.reads, &d.writes, &d.mutates, &d.after};
    Csr<std::int32_t>& list = *lists[random() % 4];
    switch (random() % 4) {
      case 0:
        if (!list.item.empty()) list.item[random() % list.item.size()] = static_cast<std::int32_t>(random() >> (random() % 64));
        break;
      case 1:
        list.offset[random() % 5] = static_cast<std::int64_t>(random() >> (random() % 64));
        break;
      case 2:
        std::shuffle(list.offset.begin(), list.offset.end(), random);
        break;
      default:
        list.item.resize(random() % 9);
    }
    try {
      const Graph graph(d);
      CHECK(graph.is_order(test::program_order(graph)));
      ++num_valid;
    } catch (const GraphError&) {
    }
  }
  CHECK(num_valid > 100 && num_valid < 19900);
}

TEST(extra_precedences_may_contradict_the_program_order_but_not_the_dependencies) {
  const Graph graph(data({4}, {{.writes = {0}}, {.reads = {0}}, {}}));
  const std::vector<Edge> turned = {{2, 0}}, cyclic = {{1, 0}}, unknown = {{0, 3}};
  const Graph more = graph.constrained(turned);
  CHECK(more.is_order(List{2, 0, 1}));
  CHECK(!more.is_order(List{0, 1, 2}));
  CHECK_THROWS(graph.constrained(cyclic), GraphError, "cycle");
  CHECK_THROWS(graph.constrained(unknown), GraphError, "ids");
}

TEST(only_permutations_that_respect_dependencies_are_orders) {
  const Graph graph(data({4}, {{.writes = {0}}, {.reads = {0}}}));
  CHECK(graph.is_order(List{0, 1}));
  for (const List& order : {List{1, 0}, List{0}, List{0, 0}, List{0, 2}, List{-1, 0}, List{0, 1, 1}}) CHECK(!graph.is_order(order));
}

TEST(an_op_that_mutates_very_many_tensors_takes_no_quadratic_time) {
  const TensorId many = 300000;
  List all(many);
  std::iota(all.begin(), all.end(), 0);
  const Graph graph(data(std::vector<Bytes>(many, 1), {{.reads = all}, {.mutates = all}, {.mutates = all}}));
  CHECK_EQ(list(graph.preds(2)), {1});
}

OLLA_TEST_MAIN
