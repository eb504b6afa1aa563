#include "olla/ilp/ilp_search.hpp"
#include "programs.hpp"
#include "test.hpp"

using namespace olla;

namespace {

// Minimise x, least <= x <= target.
struct Least : TargetProgram {
  Least(double least, Bytes target) {
    if (least > static_cast<double>(target)) outcome_ = Outcome::kNoAnswer;
    program_.add_column(1.0, least, static_cast<double>(target), true);
  }
};

// An "answer" of value x. truth says what an answer is truly worth.
struct Problem {
  std::function<Bytes(Bytes)> truth = [](Bytes claimed) { return claimed; };
  double least = 3.0;

  Attempt operator()(Bytes target) const {
    return {std::make_unique<Least>(least, target), [] { return std::vector<double>{}; },
            [this](std::span<const double> values) { return truth(static_cast<Bytes>(values[0] + 0.5)); }};
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
  CHECK_EQ(search(problem, 519, 8, 0.0, 512).bound, Bytes{519});  // values need not be multiples
  CHECK_EQ(search(problem, 519, 7, 0.0, 512).bound, Bytes{7});
}

OLLA_HIGHS_TEST_MAIN
