#include "olla/ilp/address_ilp.hpp"

#include <algorithm>
#include <numeric>

#include "olla/ilp/address_program.hpp"
#include "olla/layout/problem/packing.hpp"

namespace olla {
namespace {

Offset lowest_gap(std::span<const Buffer> buffers, std::span<const Offset> offsets, std::size_t i) {
  std::vector<std::pair<Offset, Offset>> taken;
  for (std::size_t j = 0; j < buffers.size(); ++j) {
    const bool together = buffers[i].lower < buffers[j].upper && buffers[j].lower < buffers[i].upper;
    if (together && offsets[j] != kNotInArena) taken.emplace_back(offsets[j], offsets[j] + buffers[j].size);
  }
  std::ranges::sort(taken);
  Offset offset = 0;
  for (const auto& [begin, end] : taken) {
    if (offset + buffers[i].size <= begin) break;
    offset = std::max(offset, end);
  }
  return offset;
}

// The buffers of one part with what belongs to them.
struct PartProblem {
  std::vector<Buffer> buffers;
  std::vector<Offset> fixed, offsets;

  PartProblem(const Part& part, std::span<const Offset> all_fixed, std::span<const Offset> all_offsets) {
    for (ItemId i = 0; i < part.num_items(); ++i) {
      buffers.push_back({part.items[i].first, part.items[i].last, part.items[i].size});
      fixed.push_back(all_fixed.empty() ? kNotInArena : all_fixed[part.buffers[i]]);
      if (!all_offsets.empty()) offsets.push_back(all_offsets[part.buffers[i]]);
    }
  }
};

Attempt attempt_of(PartProblem& problem, Bytes lower_bound, Bytes target, std::int64_t max_nonzeros) {
  auto program = std::make_unique<AddressProgram>(problem.buffers, problem.fixed, lower_bound, target, max_nonzeros);
  Attempt attempt;
  attempt.start = [&problem, p = program.get()] { return p->encode(problem.offsets); };
  attempt.keep = [&problem, lower_bound, p = program.get()](std::span<const double> values) {
    std::vector<Offset> offsets = p->decode(values);
    const Bytes height = true_height(problem.buffers, offsets);
    if (height < true_height(problem.buffers, problem.offsets)) problem.offsets = std::move(offsets);
    return std::max(height, lower_bound);
  };
  attempt.program = std::move(program);
  return attempt;
}

void require_input(std::span<const Buffer> buffers, Bytes alignment, std::span<const Offset> fixed, std::span<const Offset> start) {
  for (const auto& [name, list] : {std::pair("fixed offsets", fixed), std::pair("start", start)}) {
    if (list.empty() || list.size() == buffers.size()) continue;
    throw PlanError("the " + std::string(name) + " are " + std::to_string(list.size()) +
                        " offsets, expected none or one for each of " + std::to_string(buffers.size()) + " buffers",
                    "lengths", {});
  }
  for (std::size_t i = 0; i < fixed.size(); ++i) {
    if (fixed[i] == kNotInArena || (fixed[i] >= 0 && fixed[i] % alignment == 0 && fixed[i] <= kMaxBytes)) continue;
    throw PlanError("buffer " + std::to_string(i) + " is fixed at offset " + std::to_string(fixed[i]) +
                        ", expected a multiple of " + std::to_string(alignment) + " from 0 on, or -1",
                    "fixed", {static_cast<std::int64_t>(i)});
  }
}

void require_layout(PartProblem& problem) {
  bool keeps_fixed = true;
  for (std::size_t i = 0; i < problem.fixed.size(); ++i) {
    keeps_fixed = keeps_fixed && (problem.fixed[i] == kNotInArena || problem.offsets[i] == problem.fixed[i]);
  }
  if (!keeps_fixed || true_height(problem.buffers, problem.offsets) == kMaxBytes) {
    throw PlanError("the start is no layout: two buffers alive together overlap, or one leaves its fixed offset", "start", {});
  }
  problem.offsets = settle(problem.buffers, std::vector<double>(problem.offsets.begin(), problem.offsets.end()), problem.fixed);
}

}  // namespace

std::vector<Offset> first_fit(std::span<const Buffer> buffers, std::span<const Offset> fixed) {
  using Key = double (*)(const Buffer&);
  const Key keys[] = {[](const Buffer& b) { return static_cast<double>(b.size); },
                      [](const Buffer& b) { return static_cast<double>(b.upper - b.lower); },
                      [](const Buffer& b) { return static_cast<double>(b.upper - b.lower) * static_cast<double>(b.size); }};
  std::vector<std::size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<Offset> best;
  Bytes best_height = kMaxBytes;
  for (const Key key : keys) {
    std::ranges::stable_sort(order, std::greater{}, [&](std::size_t i) { return key(buffers[i]); });
    std::vector<Offset> offsets(fixed.begin(), fixed.end());
    offsets.resize(buffers.size(), kNotInArena);
    for (const std::size_t i : order) {
      if (offsets[i] == kNotInArena) offsets[i] = lowest_gap(buffers, offsets, i);
    }
    const Bytes height = true_height(buffers, offsets);
    if (!best.empty() && height >= best_height) continue;
    best = std::move(offsets);
    best_height = height;
  }
  return best;
}

AddressIlpResult address_ilp(std::span<const Buffer> buffers, Bytes alignment, std::span<const Offset> fixed,
                             std::span<const Offset> start, Bytes lower_bound, const Highs& highs, const IlpOptions& options,
                             Control& control) {
  const std::vector<Bytes> sizes = rounded_sizes(buffers, alignment);
  require_input(buffers, alignment, fixed, start);
  const std::vector<Part> parts = reduce(buffers, sizes);
  std::vector<PartProblem> problems;
  AddressIlpResult result;
  result.figures.message = "proved: there is no better answer";
  for (const Part& part : parts) {
    PartProblem& problem = problems.emplace_back(part, fixed, start);
    if (start.empty()) problem.offsets = first_fit(problem.buffers, problem.fixed);
    require_layout(problem);
    result.load = std::max(result.load, part.load);
  }
  result.bound = std::max(result.load, (lower_bound + alignment - 1) / alignment * alignment);
  result.offsets.assign(buffers.size(), 0);
  std::string open;  // why the first part that is not proved ended
  for (std::size_t i = 0; i < fixed.size(); ++i) result.offsets[i] = std::max<Offset>(fixed[i], 0);
  for (std::size_t k = 0; k < parts.size(); ++k) {
    PartProblem& problem = problems[k];
    if (const Bytes height = true_height(problem.buffers, problem.offsets); height > std::max(result.bound, result.height)) {
      const Bytes unit = common_unit(problem.buffers, problem.fixed), enough = result.bound / unit * unit;
      IlpSearch search(height, enough, unit, highs, options, control, result.figures);
      search.run([&](Bytes target) { return attempt_of(problem, search.lower_bound(), target, options.max_nonzeros); });
      result.bound = std::max(result.bound, search.lower_bound());
      if (search.value() > search.lower_bound()) open = result.figures.message;
    }
    result.height = std::max(result.height, true_height(problem.buffers, problem.offsets));
    for (ItemId i = 0; i < parts[k].num_items(); ++i) result.offsets[parts[k].buffers[i]] = problem.offsets[i];
  }
  result.bound = std::min(result.bound, std::max(result.height, result.load));
  if (result.height == result.bound) result.status = Status::kOptimal;
  if (result.status != Status::kOptimal) result.figures.message = open;
  return result;
}

}  // namespace olla
