#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>

#include "arrays.hpp"
#include "olla/ilp/highs.hpp"

namespace olla::bindings {
namespace {

const char* name_of(MipStatus status) {
  switch (status) {
    case MipStatus::kOptimal:
      return "optimal";
    case MipStatus::kFeasible:
      return "feasible";
    case MipStatus::kInfeasible:
      return "infeasible";
    default:
      return "unknown";
  }
}

Program program_of(const Array<double>& cost, const Array<double>& lower, const Array<double>& upper,
                   const Array<std::int32_t>& integer, const Array<double>& row_lower, const Array<double>& row_upper,
                   const Array<std::int32_t>& row_start, const Array<std::int32_t>& index, const Array<double>& value) {
  Program program{copy(cost),      copy(lower),     copy(upper), copy(integer), copy(row_lower),
                  copy(row_upper), copy(row_start), copy(index), copy(value)};
  const std::size_t columns = program.cost.size(), rows = program.row_lower.size();
  const bool lengths = program.lower.size() == columns && program.upper.size() == columns && program.integer.size() == columns &&
                       program.row_upper.size() == rows && program.row_start.size() == rows + 1 &&
                       program.index.size() == program.value.size() &&
                       program.row_start.back() == static_cast<std::int32_t>(program.index.size());
  if (!lengths) throw SolverError("the arrays of the program disagree about the number of its columns, rows or entries");
  return program;
}

Bytes rounded(double value) { return std::llround(std::clamp(value, -0x1p62, 0x1p62)); }  // infinite before the first answer

}  // namespace

void bind_highs(nb::module_& m) {
  m.def(
      "highs_version", [](const std::string& path) { return Highs(path).version(); }, "path"_a,
      "Version of the HiGHS library at path.");
  m.def(
      "solve_mip",
      [](Array<double> cost, Array<double> lower, Array<double> upper, Array<std::int32_t> integer, Array<double> row_lower,
         Array<double> row_upper, Array<std::int32_t> row_start, Array<std::int32_t> index, Array<double> value,
         Array<double> start, const std::string& highs_library, double time_limit, std::int32_t seed, std::int32_t num_threads,
         nb::object progress) {
        MipOptions options;
        options.time_limit_seconds = time_limit;
        options.seed = seed;
        options.num_threads = num_threads;
        PythonProgress watcher(std::move(progress));
        const Program program = program_of(cost, lower, upper, integer, row_lower, row_upper, row_start, index, value);
        MipResult result;
        {
          nb::gil_scoped_release release;
          Control control("mip", time_limit, watcher.function());
          options.watch = [&](double objective, double bound) { return !control.stop(rounded(objective), rounded(bound)); };
          result = Highs(highs_library).solve(program, options, view(start));
        }
        watcher.raise_pending();
        return nb::make_tuple(name_of(result.status), result.objective, result.bound, to_numpy(std::move(result.values)),
                              result.num_nodes);
      },
      "cost"_a.noconvert(), "lower"_a.noconvert(), "upper"_a.noconvert(), "integer"_a.noconvert(), "row_lower"_a.noconvert(),
      "row_upper"_a.noconvert(), "row_start"_a.noconvert(), "index"_a.noconvert(), "value"_a.noconvert(), "start"_a.noconvert(),
      "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
      "(status, objective, bound, values, num_nodes) of: minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper, with A by rows. "
      "start: a value per column, or empty.");
}

}  // namespace olla::bindings
