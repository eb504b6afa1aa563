#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>

#include "ilp_figures.hpp"
#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/joint_ilp.hpp"
#include "olla/ilp/joint_program.hpp"
#include "olla/ilp/order_ilp.hpp"

namespace olla::bindings {
namespace {

nb::dict info_of(const OrderIlpResult& result) {
  nb::dict info;
  info["num_columns"] = result.num_columns;
  info["num_rows"] = result.num_rows;
  info["num_nonzeros"] = result.num_nonzeros;
  info["num_nodes"] = result.num_nodes;
  info["seconds_build"] = result.seconds_build;
  info["seconds_solve"] = result.seconds_solve;
  info["message"] = result.message;
  return info;
}

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

void bind_ilp(nb::module_& m) {
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
  m.def(
      "order_ilp",
      [](const Graph& graph, Array<OpId> start, Bytes lower_bound, const std::string& highs_library, double time_limit,
         std::int32_t seed, std::int32_t num_threads, nb::object progress, bool reduce) {
        PythonProgress watcher(std::move(progress));
        OrderIlpOptions options;
        options.seed = seed;
        options.num_threads = num_threads;
        options.reduce = reduce;
        OrderIlpResult result;
        bool cancelled = false;
        {
          nb::gil_scoped_release release;
          Control control("ilp", time_limit, watcher.function());
          result = order_ilp(graph, view(start), lower_bound, Highs(highs_library), options, control);
          cancelled = control.cancelled();
        }
        watcher.raise_pending();
        nb::dict info = info_of(result);
        info["cancelled"] = cancelled;
        const char* status = result.status == Status::kOptimal ? "optimal" : "feasible";
        return nb::make_tuple(to_numpy(std::move(result.order)), result.peak, result.lower_bound, status, info);
      },
      "graph"_a, "start"_a.noconvert(), "lower_bound"_a, "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a,
      "progress"_a.none(), "reduce"_a = true,
      "(order, peak, lower_bound, status, info): the order of least peak by OLLA's lifetime program; see olla.ilp.order_ilp. reduce=False "
      "leaves every op at every step of its span.");
  m.def(
      "address_ilp",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Bytes alignment, Array<Offset> fixed,
         Array<Offset> start, Bytes lower_bound, const std::string& highs_library, double time_limit, std::int32_t seed,
         std::int32_t num_threads, nb::object progress) {
        if (lower.size() != size.size() || upper.size() != size.size()) {
          throw PlanError("lower, upper and size differ in length: " + std::to_string(lower.size()) + ", " +
                              std::to_string(upper.size()) + ", " + std::to_string(size.size()),
                          "lengths", {});
        }
        std::vector<Buffer> buffers;
        for (std::size_t i = 0; i < size.size(); ++i) buffers.push_back({lower.data()[i], upper.data()[i], size.data()[i]});
        PythonProgress watcher(std::move(progress));
        const IlpOptions options{.seed = seed, .num_threads = num_threads};
        Control control("address", time_limit, watcher.function());
        AddressIlpResult r;
        {
          nb::gil_scoped_release release;
          r = address_ilp(buffers, alignment, view(fixed), view(start), lower_bound, Highs(highs_library), options, control);
        }
        watcher.raise_pending();
        return nb::make_tuple(to_numpy(std::move(r.offsets)), r.height, r.load, r.bound, name_of(r.status), control.cancelled(),
                              dict_of(r.figures));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "alignment"_a, "fixed"_a.noconvert(),
      "start"_a.noconvert(), "lower_bound"_a, "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
      "(offsets, height, load, bound, status, cancelled, info): the layout of least height by OLLA's address program; see olla.ilp.address_ilp.");
  m.def(
      "arena_graph",
      [](const Graph& graph, Bytes alignment) {
        nb::gil_scoped_release release;
        return arena_graph(graph, alignment);
      },
      "graph"_a, "alignment"_a,
      "The graph whose peaks are the loads of the arena: tensors no op writes have no bytes, all other sizes are rounded up.");
  m.def(
      "joint_ilp",
      [](const Graph& arena, Array<OpId> order, Array<Offset> offsets, Array<Offset> workspace_offsets, Bytes lower_bound,
         const std::string& highs_library, double time_limit, std::int32_t seed, std::int32_t num_threads, nb::object progress) {
        PythonProgress watcher(std::move(progress));
        const IlpOptions options{.seed = seed, .num_threads = num_threads};
        Control control("joint", time_limit, watcher.function());
        JointIlpResult r;
        {
          nb::gil_scoped_release release;
          r = joint_ilp(arena, view(order), view(offsets), view(workspace_offsets), lower_bound, Highs(highs_library), options,
                        control);
        }
        watcher.raise_pending();
        return nb::make_tuple(to_numpy(std::move(r.order)), to_numpy(std::move(r.offsets)),
                              to_numpy(std::move(r.workspace_offsets)), r.arena, r.lower_bound, name_of(r.status),
                              control.cancelled(), dict_of(r.figures));
      },
      "arena"_a, "order"_a.noconvert(), "offsets"_a.noconvert(), "workspace_offsets"_a.noconvert(), "lower_bound"_a,
      "highs_library"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
      "(order, offsets, workspace_offsets, arena, lower_bound, status, cancelled, info): the order and layout of the smallest arena by OLLA's "
      "joint program; see olla.ilp.joint_ilp.");
}

}  // namespace olla::bindings
