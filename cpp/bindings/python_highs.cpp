#include "python_highs.hpp"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "arrays.hpp"
#include "olla/ilp/highs_library.hpp"

namespace olla::bindings {
namespace {

class PythonEngine : public HighsEngine {
 public:
  explicit PythonEngine(nb::object object) : object_(std::move(object)), version_(nb::cast<std::string>(object_.attr("version"))) {}
  ~PythonEngine() override {
    nb::gil_scoped_acquire gil;
    object_.reset();
  }

  std::string version() const override { return version_; }

  std::function<void()> begin(std::function<void()> work) const override {
    nb::gil_scoped_acquire gil;
    return nb::cast<std::function<void()>>(object_.attr("begin")(nb::cpp_function(std::move(work))));
  }

  HighsEnd run(const Program& program, std::span<const HighsOption> options, std::span<const double> start,
               HighsProgress& progress) const override {
    nb::gil_scoped_acquire gil;
    nb::dict values;
    for (const auto& [name, value] : options) values[name] = value;
    const NumpyArray<const double> incumbent(start.data(), {start.size()}, nb::handle());
    return nb::cast<HighsEnd>(object_.attr("run")(nb::cast(&program, nb::rv_policy::reference), values, nb::cast(incumbent),
                                                  nb::cast(&progress, nb::rv_policy::reference)));
  }

 private:
  nb::object object_;
  const std::string version_;
};

}  // namespace

std::shared_ptr<const HighsEngine> engine_of(const nb::object& highs) {
  if (std::string path; nb::try_cast(highs, path)) return highs_library(path);
  return std::make_shared<PythonEngine>(highs);
}

void bind_highs(nb::module_& m) {
  using P = const Program;
  nb::class_<Program>(m, "Program", "Minimise cost x, row_lower <= A x <= row_upper, lower <= x <= upper, with A by rows.")
      .def_prop_ro("cost", array<P>(&P::cost), "float64[columns].")
      .def_prop_ro("lower", array<P>(&P::lower), "float64[columns].")
      .def_prop_ro("upper", array<P>(&P::upper), "float64[columns].")
      .def_prop_ro("integer", array<P>(&P::integer), "int32[columns]: 1 where x is a whole number.")
      .def_prop_ro("row_lower", array<P>(&P::row_lower), "float64[rows].")
      .def_prop_ro("row_upper", array<P>(&P::row_upper), "float64[rows].")
      .def_prop_ro("row_start", array<P>(&P::row_start), "int32[rows + 1]: where the entries of a row begin.")
      .def_prop_ro("index", array<P>(&P::index), "int32[entries]: the column of an entry.")
      .def_prop_ro("value", array<P>(&P::value), "float64[entries].");
  nb::class_<HighsProgress>(m, "HighsProgress", "What a run of HiGHS says while it lasts.")
      .def(
          "note",
          [](HighsProgress& self, double bound, double objective, std::optional<Array<double>> values) {
            return self.note(bound, objective, values ? view(*values) : std::span<const double>());
          },
          "bound"_a, "objective"_a, "values"_a.none(),
          "Note a bound and, where there is a new best answer, its value and float64[columns]. True: the run should stop.");
  nb::class_<HighsEnd>(m, "HighsEnd", "What HiGHS says at the end of a run, in its own numbers.")
      .def(
          "__init__",
          [](HighsEnd* self, int model_status, int primal_status, std::int64_t num_nodes, double bound, double objective,
             Array<double> values) { new (self) HighsEnd{model_status, primal_status, num_nodes, bound, objective, copy(values)}; },
          nb::kw_only(), "model_status"_a, "primal_status"_a, "num_nodes"_a, "bound"_a, "objective"_a, "values"_a);
}

}  // namespace olla::bindings
