#include "arrays.hpp"
#include "olla/base/error.hpp"
#include "olla/layout/greedy/best_fit.hpp"

namespace olla::bindings {
namespace {

std::vector<Buffer> buffers(const Array<std::int64_t>& lower, const Array<std::int64_t>& upper, const Array<Bytes>& size) {
  if (lower.size() != upper.size() || lower.size() != size.size()) {
    throw PlanError("lower, upper and size must be equally long", "lengths", {});
  }
  std::vector<Buffer> result;
  for (std::size_t i = 0; i < lower.size(); ++i) result.push_back({view(lower)[i], view(upper)[i], view(size)[i]});
  return result;
}

nb::tuple place(const std::vector<Buffer>& list, const std::vector<std::int32_t>& order, Hole rule, Bytes alignment,
                double time_limit, nb::object progress) {
  PythonProgress python(std::move(progress));
  Control control("layout", time_limit, python.function());
  FitResult result;
  {
    nb::gil_scoped_release release;
    result = fit_in_order(list, order, rule, alignment, control);
  }
  python.raise_pending();
  return nb::make_tuple(to_numpy(std::move(result.offsets)), result.height, control.cancelled());
}

}  // namespace

void bind_bestfit(nb::module_& m) {
  m.def(
      "fit_in_order",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Array<std::int32_t> order, bool lowest,
         Bytes alignment, double time_limit, nb::object progress) {
        return place(buffers(lower, upper, size), copy(order), lowest ? Hole::kLowest : Hole::kBest, alignment, time_limit,
                     std::move(progress));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "order"_a.noconvert(), "lowest"_a, "alignment"_a,
      "time_limit"_a, "progress"_a.none(),
      "(offsets, height, cancelled): buffers placed one after the other, each into the smallest hole that is large enough, or into the "
      "lowest.");
  m.def(
      "smartpool",
      [](Array<std::int64_t> lower, Array<std::int64_t> upper, Array<Bytes> size, Array<std::uint8_t> outlives, Bytes alignment,
         double time_limit, nb::object progress) {
        const std::vector<Buffer> list = buffers(lower, upper, size);
        return place(list, smartpool_order(list, view(outlives)), Hole::kBest, alignment, time_limit, std::move(progress));
      },
      "lower"_a.noconvert(), "upper"_a.noconvert(), "size"_a.noconvert(), "outlives"_a.noconvert(), "alignment"_a, "time_limit"_a,
      "progress"_a.none(), "(offsets, height, cancelled): best fit of what outlives the iteration, then by falling size.");
}

}  // namespace olla::bindings
