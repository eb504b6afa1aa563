#include "graphs.hpp"
#include "olla/ilp/recompute_ilp.hpp"
#include "programs.hpp"
#include "rules.hpp"
#include "test.hpp"

using namespace olla;
using namespace olla::test;

namespace {

struct Case {
  Graph graph;
  Rules rules;
  Values values;
  std::vector<OpId> base;

  explicit Case(GraphData d, bool in_place)
      : graph(d), rules(rules_for(d, in_place)), values(graph, rules), base(program_order(graph)) {}

  bool overwriters_run_again() const {
    for (OpId v = 0; v < graph.num_ops(); ++v) {
      if (!values.rerun_overwrites[v].empty()) return true;
    }
    return false;
  }
};

// Every set of drops: the least added time within each peak that one has. Empty where there are too many.
std::vector<Point> all_points(const Case& c, std::size_t most_drops = 12) {
  std::vector<Drop> drops;
  for (ValueId x = 0; x < c.values.num_values(); ++x) {
    if (c.values.producer[x] == kNoOp || c.graph.bytes(c.values.tensor[x]) == 0) continue;
    for (Step s = c.values.producer[x]; s + 1 < static_cast<Step>(c.base.size()); ++s) drops.push_back({x, s});
  }
  if (drops.size() > most_drops) return {};
  Rewriter rewriter(c.graph, c.values, c.rules, c.base);
  Rewrite rewrite;
  std::vector<Point> points;
  for (std::uint32_t chosen = 0; chosen < 1u << drops.size(); ++chosen) {
    DropSet set(c.values.num_values());
    for (std::size_t i = 0; i < drops.size(); ++i) {
      if (chosen >> i & 1) set.add(drops[i]);
    }
    if (!rewriter.build(set, rewrite)) continue;
    const auto same = [&](const Point& p) { return p.peak == rewrite.peak && p.added_seconds == rewrite.added_seconds; };
    if (std::none_of(points.begin(), points.end(), same)) points.push_back({rewrite.peak, rewrite.added_seconds});
  }
  return points;
}

RecomputeIlpResult solve(RecomputeSearch& search, const Target& target, double time_limit = 60.0) {
  Control control("budget_ilp", time_limit, {});
  return recompute_ilp(search, target, Highs(highs_library()), IlpOptions{}, control);
}

// Both goals, at every point that is not dominated, against every set of drops.
int compare(const Case& c, const std::vector<Point>& points) {
  int num_compared = 0;
  for (const Point& p : points) {
    double least_seconds = 1e30;
    Bytes least_peak = kMaxBytes;
    for (const Point& q : points) {
      if (q.peak <= p.peak) least_seconds = std::min(least_seconds, q.added_seconds);
      if (q.added_seconds <= p.added_seconds) least_peak = std::min(least_peak, q.peak);
    }
    if (least_seconds < p.added_seconds || least_peak < p.peak) continue;  // dominated
    RecomputeSearch by_peak(c.graph, c.rules, c.base), by_time(c.graph, c.rules, c.base);
    const RecomputeIlpResult time = solve(by_peak, {true, p.peak, 0.0}), peak = solve(by_time, {false, 0, p.added_seconds});
    CHECK(time.status == Status::kOptimal && peak.status == Status::kOptimal);
    CHECK(by_peak.evictor().rewrite().peak <= p.peak);
    CHECK(std::abs(by_peak.evictor().rewrite().added_seconds - least_seconds) < 1e-9);
    CHECK(std::abs(time.bound - least_seconds) < 1e-6);
    CHECK_EQ(by_time.evictor().rewrite().peak, least_peak);
    ++num_compared;
    if (points.size() > 1 && least_peak == p.peak) {
      RecomputeSearch nothing(c.graph, c.rules, c.base);
      const auto lowest =
          std::min_element(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.peak < b.peak; });
      CHECK(solve(nothing, {true, lowest->peak - 1, 0.0}).status == Status::kInfeasible);
    }
  }
  return num_compared;
}

}  // namespace

TEST(answers_equal_the_best_of_every_set_of_drops) {
  int num_cases = 0, num_points = 0;
  for (std::uint32_t seed = 0; seed < 300 && num_cases < 20; ++seed) {
    const Case c(test::random_data(5, seed), seed % 2 == 1);
    if (c.overwriters_run_again()) continue;
    const auto points = all_points(c);
    if (points.empty()) continue;
    ++num_cases;
    num_points += compare(c, points);
  }
  CHECK(num_cases > 10 && num_points > 10);
}

TEST(a_training_step_meets_the_best_of_every_set_of_drops) {
  for (const bool in_place : {false, true}) {
    GraphData d = training(3);
    const Case c(d, in_place);
    const auto points = all_points(c, 15);
    CHECK(!points.empty());
    CHECK(compare(c, points) >= 2);
  }
}

TEST(answers_are_at_least_as_good_as_those_they_start_from) {
  const Case c(training(12), true);
  for (const Bytes peak : {110, 90, 75}) {
    RecomputeSearch search(c.graph, c.rules, c.base);
    const Evictor& evictor = search.evictor();
    Control control("budget", 10, {});
    search.evictor().run({peak, 1e30}, control);
    const double greedy = evictor.rewrite().added_seconds;
    const RecomputeIlpResult result = solve(search, {true, peak, 0.0}, test::kSanitized ? 2.0 : 10.0);
    CHECK(evictor.rewrite().peak <= peak);
    CHECK(evictor.rewrite().added_seconds <= greedy);
    CHECK(result.bound <= evictor.rewrite().added_seconds);
  }
}

TEST(an_answer_of_drops_reads_back_as_those_drops) {
  const Case c(training(8), true);
  RecomputeSearch search(c.graph, c.rules, c.base);
  Evictor& evictor = search.evictor();
  Control control("budget", 10, {});
  const Rewrite plain = evictor.rewrite();
  evictor.run({60, 1e30}, control);
  const Rewrite& greedy = evictor.rewrite();
  CHECK(greedy.num_reruns > 0);
  for (const bool prune : {false, true}) {
    const RecomputeProgram program(search, plain, {true, greedy.peak, 0.0}, plain.peak, prune, 1'000'000);
    const auto answer = program.encode(greedy);
    if (prune && answer.empty()) continue;
    CHECK(!answer.empty());
    const Program& p = program.program();
    double objective = 0;
    for (Column j = 0; j < p.num_columns(); ++j) objective += p.cost[j] * answer[j];
    CHECK(std::abs(program.added_seconds(objective) - greedy.added_seconds) < 1e-9);
    for (std::int32_t i = 0; i < p.num_rows(); ++i) {
      double activity = 0;
      for (auto k = p.row_start[i]; k < p.row_start[i + 1]; ++k) activity += p.value[k] * answer[p.index[k]];
      CHECK(activity >= p.row_lower[i] - 1e-6 && activity <= p.row_upper[i] + 1e-6);
    }
    DropSet drops(c.values.num_values());
    for (const Drop& drop : program.decode(answer)) drops.add(drop);
    Rewriter rewriter(c.graph, c.values, c.rules, c.base);
    Rewrite again;
    CHECK(rewriter.build(drops, again));
    CHECK_EQ(again.peak, greedy.peak);
    CHECK(std::abs(again.added_seconds - greedy.added_seconds) < 1e-9);
  }
}

TEST(a_program_that_is_too_large_leaves_what_was_there) {
  const Case c(training(12), false);
  RecomputeSearch search(c.graph, c.rules, c.base);
  Evictor& evictor = search.evictor();
  Control control("budget_ilp", 10, {});
  evictor.run({90, 1e30}, control);
  const double greedy = evictor.rewrite().added_seconds;
  IlpOptions options;
  options.max_nonzeros = 10;
  const auto result = recompute_ilp(search, {true, 90, 0.0}, Highs(highs_library()), options, control);
  CHECK(result.status == Status::kFeasible);
  CHECK(evictor.rewrite().added_seconds == greedy);
  CHECK(result.figures.message.find("not built") != std::string::npos);
}

OLLA_HIGHS_TEST_MAIN
