#include <cmath>

#include "graphs.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/order_program.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;
using test::objective, test::satisfies;
using Outcome = OrderProgram::Outcome;

namespace {

const auto never = [] { return false; };

OrderProgram program_of(const Graph& graph, Bytes target, bool reduce = true, Bytes lower_bound = 0) {
  OrderProgramOptions options;
  options.target = target;
  options.reduce = reduce;
  options.lower_bound = lower_bound;
  return OrderProgram(graph, options, never);
}

// Two chains of two ops each, nothing shared; every tensor has another size and is used by the next op of its chain only.
Graph two_chains() {
  return Graph(test::data(
      {4, 1, 6, 2}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.writes = {2}}, {.reads = {2}, .writes = {3}}}, {1, 3}));
}

}  // namespace

TEST(a_chain_needs_no_variable_but_the_peak) {
  const Graph graph(test::data({5, 7}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {1}}}));
  const OrderProgram p = program_of(graph, 12, false);
  CHECK_EQ(p.program().num_columns(), 1);
  CHECK_EQ(p.program().num_rows(), 0);
  CHECK_EQ(p.value_bytes(p.program().lower[0]), Bytes{12});
}

TEST(the_program_as_stated_has_the_size_of_its_spans) {
  const OrderProgram p = program_of(two_chains(), 100, false);
  // Each op can stand at three steps, so has two columns; then the peak. Rows: rising 4, one op per step 3, precedences 2 each,
  // memory at the four steps.
  CHECK_EQ(p.program().num_columns(), 4 * 2 + 1);
  CHECK_EQ(p.program().num_rows(), 4 + 3 + 4 + 4);
}

TEST(variables_that_the_target_rules_out_are_absent) {
  // Of the six orders 2 3 0 1 has a peak of 8 bytes, 0 1 2 3 one of 9, the others have 10 or more.
  const Graph graph = two_chains();
  CHECK(program_of(graph, 9).program().num_columns() > 1);
  CHECK(program_of(graph, 9).program().num_columns() < program_of(graph, 9, false).program().num_columns());
  CHECK_EQ(program_of(graph, 8).program().num_columns(), 1);
  CHECK_EQ(program_of(graph, 8).decode(std::vector<double>{0.0}), {2, 3, 0, 1});
  CHECK(program_of(graph, 7).outcome() == Outcome::kNoAnswer);
}

TEST(memory_rows_below_the_lower_bound_are_absent) {
  const OrderProgram p = program_of(two_chains(), 100, false, 13);
  CHECK_EQ(p.program().num_rows(), 4 + 3 + 4);
}

TEST(a_tensor_with_two_last_users_gets_a_death_column_and_one_with_one_none) {
  auto num_continuous = [](const Graph& graph) {
    const OrderProgram p = program_of(graph, 100, false);
    return std::count(p.program().integer.begin(), p.program().integer.end(), 0);
  };
  CHECK_EQ(num_continuous(Graph(test::data({4, 1, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.writes = {2}}}))), 0);
  CHECK_EQ(
      num_continuous(Graph(test::data({4, 1, 1}, {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.reads = {0}, .writes = {2}}}))),
      1);
}

TEST(every_order_within_the_target_encodes_into_an_answer_with_its_peak) {
  std::size_t num_columns = 0;
  for (std::uint32_t seed = 0; seed < 120; ++seed) {
    const Graph graph(test::random_data(6, seed));
    const Bytes target = profile(graph, test::program_order(graph)).peak - static_cast<Bytes>(seed % 4);
    for (const bool reduce : {true, false}) {
      const OrderProgram p = program_of(graph, target, reduce);
      num_columns += static_cast<std::size_t>(p.program().num_columns());
      test::for_each_order(graph, [&](const std::vector<OpId>& order) {
        if (profile(graph, order).peak > target) return;
        CHECK(p.outcome() == Outcome::kBuilt);
        const std::vector<OpId> gathered = gather(p.blocks(), order);
        const Bytes peak = profile(graph, gathered).peak;
        const std::vector<double> values = p.encode(order);
        CHECK(!values.empty());
        if (values.empty()) return;
        CHECK(satisfies(p.program(), values));
        CHECK_EQ(p.decode(values), gathered);
        const double least = p.program().lower[p.program().num_columns() - 1];
        CHECK_EQ(p.value_bytes(objective(p.program(), values)) >= peak, true);
        if (objective(p.program(), values) > least) CHECK_EQ(p.value_bytes(objective(p.program(), values)), peak);
      });
    }
  }
  CHECK(num_columns > 1000);
}

TEST(a_program_beyond_the_limit_is_not_built) {
  std::vector<test::Op> ops(60);
  std::vector<Bytes> bytes;
  for (test::Op& op : ops) {
    op.writes = {static_cast<TensorId>(bytes.size())};
    bytes.push_back(1 + static_cast<Bytes>(bytes.size()));
  }
  OrderProgramOptions options;
  options.max_nonzeros = 1000;
  options.reduce = false;
  const OrderProgram p(Graph(test::data(bytes, ops)), options, never);
  CHECK(p.outcome() == Outcome::kTooLarge);
  CHECK(p.num_nonzeros() > 1000);
  CHECK_EQ(p.program().num_columns(), 0);
}

TEST(sizes_too_far_apart_for_floating_point_are_rounded_down) {
  const Graph graph(test::data({3, (Bytes{1} << 40) + 1, 5}, {{.writes = {0}}, {.writes = {1}}, {.writes = {2}}}, {0, 1, 2}));
  const OrderProgram p = program_of(graph, kMaxBytes / 2, false);
  CHECK(!p.exact());
  const Bytes peak = profile(graph, test::program_order(graph)).peak;
  const Bytes claimed = p.value_bytes(objective(p.program(), p.encode(test::program_order(graph))));
  CHECK(claimed <= peak && peak <= claimed + p.max_rounding_bytes());
  for (const double value : p.program().value) CHECK(std::abs(value) <= 0x1p26);
}

TEST(split_rows_tell_large_sizes_apart_to_the_byte) {
  const Graph graph(test::data({3, (Bytes{1} << 40) + 1, 5, (Bytes{1} << 39) + 7},
                               {{.writes = {0}}, {.reads = {0}, .writes = {1}}, {.writes = {2}}, {.reads = {2}, .writes = {3}}},
                               {0, 2}));
  OrderProgramOptions options;
  options.split = true;
  options.reduce = false;
  options.target = Bytes{1} << 42;
  test::for_each_order(graph, [&](const std::vector<OpId>& order) {
    const OrderProgram p(graph, options, never);
    CHECK(p.exact());
    for (const double value : p.program().value) CHECK(std::abs(value) <= 0x1p26);
    const std::vector<double> values = p.encode(order);
    CHECK(satisfies(p.program(), values));
    CHECK_EQ(p.value_bytes(objective(p.program(), values)), profile(graph, order).peak);
    OrderProgramOptions tight = options;
    tight.target = profile(graph, order).peak - 1;
    const OrderProgram below(graph, tight, never);
    CHECK(below.outcome() == Outcome::kNoAnswer || below.encode(order).empty());  // one byte too many
  });
}

TEST(the_grid_of_peaks_leaves_out_what_is_resident) {
  const Graph graph(test::data({7, 512, 1024}, {{.reads = {0}, .writes = {1}}, {.writes = {2}}}));
  CHECK_EQ(peak_grid(graph), Bytes{512});
}

OLLA_TEST_MAIN
