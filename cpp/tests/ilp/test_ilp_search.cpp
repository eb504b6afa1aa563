#include "olla/ilp/ilp_search.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;

namespace {

// Minimise x, 3 <= x <= target: an "answer" of value x. keep says what an answer is truly worth.
struct Problem {
  Program program;
  std::function<Bytes(Bytes)> truth = [](Bytes claimed) { return claimed; };
  double least = 3.0;

  TargetProgram operator()(Bytes target) {
    program = {};
    program.add_column(1.0, least, static_cast<double>(target), true);
    TargetProgram result;
    if (least > static_cast<double>(target)) return result;  // no answer
    result.outcome = TargetProgram::Outcome::kBuilt;
    result.program = &program;
    result.value_of = [](double objective) { return static_cast<Bytes>(objective + 0.5); };
    result.bound_of = [](double bound) { return static_cast<Bytes>(bound + 0.5); };
    result.keep = [this](std::span<const double> values) { return truth(static_cast<Bytes>(values[0] + 0.5)); };
    return result;
  }
};

struct Searched {
  Bytes value, bound;
  IlpFigures figures;
};

Searched search(Problem& problem, Bytes value, Bytes lower_bound, double time_limit = 60.0, Bytes grid = 1) {
  const Highs highs(test::highs_library());
  const IlpOptions options;
  Control control("test", time_limit, {});
  Searched result;
  IlpSearch run(value, lower_bound, grid, highs, options, control, result.figures);
  run.run([&](Bytes target) { return problem(target); });
  result.value = run.value();
  result.bound = run.lower_bound();
  return result;
}

}  // namespace

TEST(a_search_ends_where_value_and_bound_meet) {
  Problem problem;
  const Searched result = search(problem, 9, 0);
  CHECK_EQ(result.value, Bytes{3});
  CHECK_EQ(result.bound, Bytes{3});
  CHECK_EQ(result.figures.message, std::string("proved: there is no better answer"));
}

TEST(a_bound_that_is_met_needs_no_solver) {
  Problem problem;
  CHECK_EQ(search(problem, 3, 3).figures.num_columns, 0);
}

TEST(an_answer_worse_than_claimed_is_a_false_optimum) {
  Problem problem;
  problem.truth = [](Bytes claimed) { return claimed + 1; };
  CHECK_THROWS(search(problem, 9, 0), SolverError, "solver");
}

TEST(an_optimum_that_the_start_contradicts_is_a_false_optimum) {
  Problem problem;
  problem.least = 8.0;  // the program has no answer as good as the start
  CHECK_THROWS(search(problem, 5, 0), SolverError, "solver");
}

TEST(an_answer_below_the_bound_proves_the_bound_false) {
  Problem problem;
  problem.truth = [](Bytes) { return Bytes{1}; };
  CHECK_THROWS(search(problem, 9, 3), SolverError, "solver");
}

TEST(a_bound_above_the_start_is_refused) {
  Problem problem;
  CHECK_THROWS(search(problem, 2, 3), SolverError, "solver");
}

TEST(without_time_nothing_is_claimed) {
  Problem problem;
  const Searched result = search(problem, 9, 1, 0.0);
  CHECK_EQ(result.value, Bytes{9});
  CHECK_EQ(result.bound, Bytes{1});
}

TEST(bounds_are_rounded_up_to_the_grid) {
  Problem problem;
  problem.least = 8.0;
  CHECK_EQ(search(problem, 8, 5, 60.0, 4).bound, Bytes{8});
}

OLLA_HIGHS_TEST_MAIN
