#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>

#include "arrays.hpp"
#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/joint_ilp.hpp"
#include "olla/ilp/joint_program.hpp"
#include "olla/ilp/order_ilp.hpp"
#include "olla/ilp/recompute_ilp.hpp"
#include "olla/recompute/recompute.hpp"
#include "python_highs.hpp"

namespace olla::bindings {
namespace {

// HiGHS, and how it searches.
struct Solver {
  std::shared_ptr<const HighsEngine> engine;
  double time_limit;
  std::int32_t seed, num_threads;
  nb::object progress;

  IlpOptions options() const { return {.seed = seed, .num_threads = num_threads}; }

  // Runs work(highs, control) without the GIL.
  template <class Work>
  auto run(const char* stage, Work work) const {
    return search(stage, {time_limit, {}, progress}, [&](Control& control) { return work(Highs(engine), control); });
  }
};

// Of a Status or a MipStatus.
template <class S>
const char* name_of(S status) {
  return status == S::kOptimal      ? "optimal"
         : status == S::kFeasible   ? "feasible"
         : status == S::kInfeasible ? "infeasible"
                                    : "unknown";
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

// What the answers of all programs say.
template <class Result>
nb::class_<Result> bind_answer(nb::module_& m, const char* name, const char* doc) {
  return nb::class_<Result>(m, name, doc)
      .def_prop_ro(
          "status", [](const Result& r) { return name_of(r.status); },
          "optimal, exactly when value and bound meet; feasible; infeasible.")
      .def_ro("cancelled", &Result::cancelled, "Whether the progress callback, or Ctrl-C, ended the search.")
      .def_ro("figures", &Result::figures);
}

void bind_answers(nb::module_& m) {
  nb::class_<IlpFigures>(m, "IlpFigures", "What happened on the way; the sizes are those of the last program.")
      .def_ro("message", &IlpFigures::message, "Why it ended, for a person.")
      .def_ro("num_columns", &IlpFigures::num_columns)
      .def_ro("num_rows", &IlpFigures::num_rows)
      .def_ro("num_nonzeros", &IlpFigures::num_nonzeros)
      .def_ro("num_nodes", &IlpFigures::num_nodes)
      .def_ro("seconds_build", &IlpFigures::seconds_build)
      .def_ro("seconds_solve", &IlpFigures::seconds_solve);
  using Mip = Found<MipResult>;
  nb::class_<Mip>(m, "MipResult", "What HiGHS says of a program.")
      .def_prop_ro(
          "status", [](const Mip& r) { return name_of(r.status); }, "optimal, feasible, infeasible, unknown.")
      .def_ro("objective", &Mip::objective)
      .def_ro("bound", &Mip::bound, "No answer is below it.")
      .def_prop_ro("values", array<Mip>(&Mip::values), "float64[columns]; empty without an answer.");
  using Order = Found<OrderIlpResult>;
  bind_answer<Order>(m, "OrderIlpResult", "What the ordering program found and proved.")
      .def_prop_ro("order", array<Order>(&Order::order), "int32[ops]: the op that runs at step i; never worse than the start.")
      .def_ro("peak_bytes", &Order::peak, "Its simulated peak, resident memory included.")
      .def_ro("lower_bound_bytes", &Order::lower_bound, "No order of the graph has a lower peak.");
  using Address = Found<AddressIlpResult>;
  bind_answer<Address>(m, "AddressIlpResult", "What the address program found and proved.")
      .def_prop_ro("offsets", array<Address>(&Address::offsets),
                   "int64[m], bytes: where buffer i begins; 0 where it is never alive or has no bytes.")
      .def_ro("height_bytes", &Address::height, "The largest end of a buffer, sizes rounded up to the alignment.")
      .def_ro("load_bytes", &Address::load, "Most bytes alive at once, of the same sizes.")
      .def_ro("lower_bound_bytes", &Address::bound, "No layout that keeps the fixed offsets is lower.");
  using Joint = Found<JointIlpResult>;
  bind_answer<Joint>(m, "JointIlpResult", "What the joint program found and proved.")
      .def_prop_ro("order", array<Joint>(&Joint::order), "int32[ops]: the op that runs at step i.")
      .def_prop_ro("offsets", array<Joint>(&Joint::offsets),
                   "int64[tensors], bytes: where tensor i begins in the arena; -1 where no op writes it.")
      .def_prop_ro("workspace_offsets", array<Joint>(&Joint::workspace_offsets),
                   "int64[ops], bytes: the same of workspaces; -1 where op i has none.")
      .def_ro("arena_bytes", &Joint::arena, "The largest end of a tensor or workspace.")
      .def_ro("lower_bound_bytes", &Joint::lower_bound, "No order and layout have a smaller arena.");
  using Recompute = Found<RecomputeIlpResult>;
  bind_answer<Recompute>(m, "RecomputeIlpResult", "What the recomputation program proved; the decisions it found are in force.")
      .def_ro("bound", &Recompute::bound,
              "No drops on the base order have less added time or, where that is limited, a lower peak.")
      .def_ro("pruned", &Recompute::pruned,
              "That, and the status, hold for drops of values idle at a step above the target alone.");
}

}  // namespace

void bind_ilp(nb::module_& m) {
  bind_answers(m);
  bind_highs(m);
  nb::class_<Solver>(m, "Solver", "HiGHS, and how it searches.")
      .def(
          "__init__",
          [](Solver* self, nb::object highs, double time_limit, std::int32_t seed, std::int32_t num_threads, nb::object progress) {
            new (self) Solver{engine_of(highs), time_limit, seed, num_threads, std::move(progress)};
          },
          nb::kw_only(), "highs"_a, "time_limit"_a, "seed"_a, "num_threads"_a, "progress"_a.none(),
          "highs: the path of its shared library, or an olla.ilp.extension.HighsExtension.")
      .def_prop_ro("highs_version", [](const Solver& self) { return self.engine->version(); });
  m.def(
      "solve_mip",
      [](Array<double> cost, Array<double> lower, Array<double> upper, Array<std::int32_t> integer, Array<double> row_lower,
         Array<double> row_upper, Array<std::int32_t> row_start, Array<std::int32_t> index, Array<double> value,
         Array<double> start, const Solver& solver) {
        const Program program = program_of(cost, lower, upper, integer, row_lower, row_upper, row_start, index, value);
        return solver.run("mip", [&](const Highs& highs, Control& control) {
          MipOptions options{.time_limit_seconds = solver.time_limit, .seed = solver.seed, .num_threads = solver.num_threads};
          options.watch = [&](double objective, double bound) { return !control.stop(rounded(objective), rounded(bound)); };
          return highs.solve(program, options, view(start));
        });
      },
      "cost"_a.noconvert(), "lower"_a.noconvert(), "upper"_a.noconvert(), "integer"_a.noconvert(), "row_lower"_a.noconvert(),
      "row_upper"_a.noconvert(), "row_start"_a.noconvert(), "index"_a.noconvert(), "value"_a.noconvert(), "start"_a.noconvert(),
      "solver"_a,
      "Minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper, with A by rows. start: a value per column, or empty.");
  m.def(
      "order_ilp",
      [](const Graph& graph, Array<OpId> start, Bytes lower_bound, bool reduce, const Solver& solver) {
        return solver.run("ilp", [&](const Highs& highs, Control& control) {
          return order_ilp(graph, view(start), lower_bound, highs, {solver.options(), reduce}, control);
        });
      },
      "graph"_a, "start"_a.noconvert(), "lower_bound"_a, "reduce"_a, "solver"_a,
      "The order of least peak by OLLA's lifetime program; see olla.ilp.order_ilp. reduce=False leaves every op at every step of its span.");
  m.def(
      "address_ilp",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Bytes alignment, Array<Offset> fixed,
         Array<Offset> start, Bytes lower_bound, const Solver& solver) {
        if (lower.size() != size.size() || upper.size() != size.size()) {
          throw PlanError("lower, upper and size differ in length: " + std::to_string(lower.size()) + ", " +
                              std::to_string(upper.size()) + ", " + std::to_string(size.size()),
                          "lengths", {});
        }
        std::vector<Buffer> buffers;
        for (std::size_t i = 0; i < size.size(); ++i) buffers.push_back({lower.data()[i], upper.data()[i], size.data()[i]});
        return solver.run("address", [&](const Highs& highs, Control& control) {
          return address_ilp(buffers, alignment, view(fixed), view(start), lower_bound, highs, solver.options(), control);
        });
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "alignment"_a, "fixed"_a.noconvert(),
      "start"_a.noconvert(), "lower_bound"_a, "solver"_a,
      "The layout of least height by OLLA's address program; see olla.ilp.address_ilp.");
  m.def("arena_graph", arena_graph, nb::call_guard<nb::gil_scoped_release>(), "graph"_a, "alignment"_a,
        "The graph whose peaks are the loads of the arena: tensors no op writes have no bytes, all other sizes are rounded up.");
  m.def(
      "joint_ilp",
      [](const Graph& arena, Array<OpId> order, Array<Offset> offsets, Array<Offset> workspace_offsets, Bytes lower_bound,
         const Solver& solver) {
        return solver.run("joint", [&](const Highs& highs, Control& control) {
          return joint_ilp(arena, view(order), view(offsets), view(workspace_offsets), lower_bound, highs, solver.options(),
                           control);
        });
      },
      "arena"_a, "order"_a.noconvert(), "offsets"_a.noconvert(), "workspace_offsets"_a.noconvert(), "lower_bound"_a, "solver"_a,
      "The order and layout of the smallest arena by OLLA's joint program; see olla.ilp.joint_ilp.");
  m.def(
      "recompute_ilp",
      [](RecomputeSearch& self, const Target& target, const Solver& solver) {
        return solver.run("budget_ilp", [&](const Highs& highs, Control& control) {
          return recompute_ilp(self, target, highs, solver.options(), control);
        });
      },
      "search"_a, "target"_a, "solver"_a,
      "Put the best decisions for the base order in force, by integer program; see olla.recompute.ilp.");
}

}  // namespace olla::bindings
