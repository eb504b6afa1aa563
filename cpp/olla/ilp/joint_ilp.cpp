#include "olla/ilp/joint_ilp.hpp"

#include <algorithm>

#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/joint_program.hpp"

namespace olla {
namespace {

// The best arrangement so far.
struct Best {
  Arrangement arrangement;
  Bytes height;
};

Attempt attempt_of(const Graph& arena, std::span<const ArenaBuffer> buffers, Best& best, const OrderProgramOptions& options,
                   const std::function<bool()>& stop) {
  auto program = std::make_unique<JointProgram>(arena, options, stop);
  Attempt attempt;
  attempt.start = [&best, p = program.get()] { return p->encode(best.arrangement); };
  attempt.keep = [p = program.get(), &arena, buffers, &best](std::span<const double> values) {
    Arrangement found = p->decode(values);
    if (!arena.is_order(found.order)) throw SolverError("the answer of HiGHS is no order of the ops: its tolerances were exceeded");
    const Bytes height = true_height(lifetimes_of(buffers, found.order), found.offsets);
    if (height < best.height) best = {std::move(found), height};
    return height;
  };
  attempt.program = std::move(program);
  return attempt;
}

Best start_of(const Graph& arena, std::span<const ArenaBuffer> buffers, std::span<const OpId> order,
              std::span<const Offset> offsets, std::span<const Offset> workspace_offsets) {
  if (!arena.is_order(order)) throw PlanError("the start breaks a dependency or is no permutation of the ops", "order", {});
  const std::vector<Buffer> lifetimes = lifetimes_of(buffers, order);
  Best best{{{order.begin(), order.end()}, {}}, 0};
  if (offsets.empty() && workspace_offsets.empty()) {
    best.arrangement.offsets = first_fit(lifetimes, {});
  } else if (offsets.size() != static_cast<std::size_t>(arena.num_tensors()) || workspace_offsets.size() != order.size()) {
    throw PlanError("the start has " + std::to_string(offsets.size()) + " tensor and " + std::to_string(workspace_offsets.size()) +
                        " workspace offsets, expected " + std::to_string(arena.num_tensors()) + " and " +
                        std::to_string(order.size()),
                    "lengths", {});
  } else {
    for (const ArenaBuffer& b : buffers) {
      best.arrangement.offsets.push_back(b.tensor >= 0 ? offsets[b.tensor] : workspace_offsets[b.producer]);
    }
  }
  Arrangement& start = best.arrangement;
  if (true_height(lifetimes, start.offsets) == kMaxBytes) {
    throw PlanError("the start is no layout: buffers that are alive together overlap", "start", {});
  }
  start.offsets = settle(lifetimes, std::vector<double>(start.offsets.begin(), start.offsets.end()), {});
  best.height = true_height(lifetimes, start.offsets);
  return best;
}

}  // namespace

JointIlpResult joint_ilp(const Graph& arena, std::span<const OpId> order, std::span<const Offset> offsets,
                         std::span<const Offset> workspace_offsets, Bytes lower_bound, const Highs& highs,
                         const IlpOptions& options, Control& control) {
  const std::vector<ArenaBuffer> buffers = arena_buffers(arena, nullptr);
  Best best = start_of(arena, buffers, order, offsets, workspace_offsets);
  JointIlpResult result;
  IlpSearch search(best.height, std::max(lower_bound, simple_bound(arena)), peak_grid(arena), highs, options, control,
                   result.figures);
  search.run([&](Bytes target) {
    OrderProgramOptions program;
    program.target = target;
    program.lower_bound = search.lower_bound();
    program.max_nonzeros = options.max_nonzeros;
    return attempt_of(arena, buffers, best, program, [&] { return search.stop(); });
  });
  result.arena = best.height;
  result.lower_bound = search.lower_bound();
  if (result.arena == result.lower_bound) result.status = Status::kOptimal;
  result.order = std::move(best.arrangement.order);
  result.offsets.assign(arena.num_tensors(), kNotInArena);
  result.workspace_offsets.assign(arena.num_ops(), kNotInArena);
  for (TensorId t = 0; t < arena.num_tensors(); ++t) {
    if (arena.producer(t) != kNoOp) result.offsets[t] = 0;  // what has no bytes lies anywhere
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Offset offset = best.arrangement.offsets[i];
    (buffers[i].tensor >= 0 ? result.offsets[buffers[i].tensor] : result.workspace_offsets[buffers[i].producer]) = offset;
  }
  return result;
}

}  // namespace olla
