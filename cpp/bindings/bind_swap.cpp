#include "arrays.hpp"
#include "olla/base/error.hpp"
#include "olla/swap/search.hpp"

namespace olla::bindings {
namespace {

struct IdleBlocks {
  std::vector<IdleBlock> blocks;
};

std::vector<IdleBlock> blocks_of(const Array<TensorId>& tensor, const Array<Bytes>& bytes, const Array<Step>& made,
                                 const Array<Step>& last, const Array<Step>& next) {
  for (const std::size_t size : {bytes.size(), made.size(), last.size(), next.size()})
    if (size != tensor.size()) throw PlanError("the columns of the blocks have different lengths", "swap", {});
  std::vector<IdleBlock> blocks;
  for (std::size_t i = 0; i < tensor.size(); ++i)
    blocks.push_back({tensor.data()[i], bytes.data()[i], made.data()[i], last.data()[i], next.data()[i]});
  return blocks;
}

void check_ranges(const IdleBlocks& idle, std::size_t num_steps) {
  for (std::size_t i = 0; i < idle.blocks.size(); ++i) {
    const IdleBlock& b = idle.blocks[i];
    if (b.bytes < 0 || b.made < 0 || b.made > b.last || b.last + 1 == b.next || b.next < 0 ||
        std::max(b.last, b.next) >= static_cast<Step>(num_steps))
      throw PlanError("idle block " + std::to_string(i) + " is out of its range", "swap", {static_cast<std::int64_t>(i)});
  }
}

std::vector<std::int32_t> valid(const SwapSearch& self, const Array<std::int32_t>& blocks) {
  for (const std::int32_t b : view(blocks))
    if (b < 0 || b >= self.num_blocks()) throw PlanError("there is no idle block " + std::to_string(b), "swap", {b});
  return copy(blocks);
}

}  // namespace

void bind_swap(nb::module_& m) {
  nb::class_<Timeline>(m, "SwapTimeline", "When swaps run beside ops, in seconds; see cpp/olla/swap/timeline.hpp.")
      .def_prop_ro("start", array<Timeline>(&Timeline::start), "float64[steps]: of the op of step s.")
      .def_prop_ro("out_start", array<Timeline>(&Timeline::out_start), "float64[swaps], like all that follow but the figures.")
      .def_prop_ro("out_end", array<Timeline>(&Timeline::out_end))
      .def_prop_ro("in_start", array<Timeline>(&Timeline::in_start))
      .def_prop_ro("in_end", array<Timeline>(&Timeline::in_end))
      .def_prop_ro("freed", array<Timeline>(&Timeline::freed), "int32[swaps]: the first step without the block.")
      .def_ro("peak_bytes", &Timeline::peak)
      .def_ro("stall_seconds", &Timeline::stall_seconds, "That ops wait.")
      .def_ro("host_bytes", &Timeline::host_bytes, "Most in host memory at once.");
  nb::class_<SwapChoice>(m, "SwapChoice", "Blocks that are swapped, in the order of their copies out, and when.")
      .def_prop_ro("block", array<SwapChoice>(&SwapChoice::block), "int32[swaps]; a block that wraps has two.")
      .def_prop_ro("ready", column(&SwapChoice::swaps, &Swap::ready), kOwned,
                   "int32[swaps], steps, as those that follow; see Swap in timeline.hpp.")
      .def_prop_ro("last", column(&SwapChoice::swaps, &Swap::last), kOwned)
      .def_prop_ro("issue", column(&SwapChoice::swaps, &Swap::issue), kOwned)
      .def_prop_ro("next", column(&SwapChoice::swaps, &Swap::next), kOwned)
      .def_ro("timeline", &SwapChoice::timeline);
  nb::class_<Link>(m, "CoreLink", "How fast copies are, each way; see olla.Link.")
      .def(nb::init<double, double, double, double>(), nb::kw_only(), "out_bytes_per_second"_a, "out_latency_seconds"_a,
           "in_bytes_per_second"_a, "in_latency_seconds"_a);
  nb::class_<IdleBlocks>(m, "IdleBlocks", "Gaps between two uses of a tensor.")
      .def(
          "__init__",
          [](IdleBlocks* self, Array<TensorId> tensor, Array<Bytes> num_bytes, Array<Step> made, Array<Step> last,
             Array<Step> next) { new (self) IdleBlocks{blocks_of(tensor, num_bytes, made, last, next)}; },
          nb::kw_only(), "tensor"_a.noconvert(), "num_bytes"_a.noconvert(), "made"_a.noconvert(), "last"_a.noconvert(),
          "next"_a.noconvert())
      .def_prop_ro("tensor", column(&IdleBlocks::blocks, &IdleBlock::tensor), kOwned, "int32[blocks].")
      .def_prop_ro("made", column(&IdleBlocks::blocks, &IdleBlock::made), kOwned, "int32[blocks]: the last step that changed it.")
      .def_prop_ro("last", column(&IdleBlocks::blocks, &IdleBlock::last), kOwned,
                   "int32[blocks]: the step of its use before the gap.")
      .def_prop_ro("next", column(&IdleBlocks::blocks, &IdleBlock::next), kOwned,
                   "int32[blocks]: that of its use after; next <= last: in the next step.");
  m.def(
      "idle_blocks",
      [](const Graph& graph, Array<OpId> order, Bytes min_bytes, Array<TensorId> lasting) {
        if (!graph.is_order(view(order))) throw GraphError("the order is no order of the graph", "program_order", {});
        for (const TensorId t : view(lasting))
          if (t < 0 || t >= graph.num_tensors()) throw GraphError("there is no tensor " + std::to_string(t), "ids", {t});
        return IdleBlocks{idle_blocks(graph, view(order), min_bytes, view(lasting))};
      },
      "graph"_a, "order"_a.noconvert(), "min_bytes"_a, "lasting"_a.noconvert(),
      "Every gap between two uses, in steps of the order; of what lasts, also the one to the next step.");
  nb::class_<SwapSearch>(m, "CoreSwapSearch", "Which idle blocks to copy to host memory; see olla.swap.")
      .def(
          "__init__",
          [](SwapSearch* self, Array<Bytes> live, Array<double> seconds, const IdleBlocks& idle, const Link& link,
             Bytes host_bytes) {
            swap_timeline({view(live), view(seconds)}, {}, link, kNoLimit);  // the lengths of the steps
            check_ranges(idle, live.size());
            new (self) SwapSearch(copy(live), copy(seconds), idle.blocks, link, host_bytes);
          },
          nb::kw_only(), "live"_a.noconvert(), "seconds"_a.noconvert(), "blocks"_a, "link"_a, "host_bytes"_a)
      .def(
          "evaluate",
          [](const SwapSearch& self, Array<std::int32_t> blocks, Bytes limit, bool stalls, bool by_last) {
            return self.evaluate(valid(self, blocks), limit, stalls, by_last);
          },
          "blocks"_a.noconvert(), "limit"_a, "stalls"_a, "by_last"_a, "Of these blocks, those that fit.")
      .def(
          "fit",
          [](SwapSearch& self, Bytes limit, double most_stall_seconds, const Limits& limits) -> SwapChoice {
            return search("swap", limits, [&](Control& control) { return self.fit(limit, most_stall_seconds, control); });
          },
          "limit"_a, "most_stall_seconds"_a, "limits"_a, "Blocks with which the peak is at most the limit, or the best found.")
      .def(
          "least_peak",
          [](SwapSearch& self, double most_stall_seconds, nb::list starts, std::uint64_t seed, int num_rounds,
             const Limits& limits) -> SwapChoice {
            std::vector<std::vector<std::int32_t>> given;
            for (nb::handle start : starts) given.push_back(valid(self, nb::cast<Array<std::int32_t>>(start)));
            return search("swap", limits,
                          [&](Control& control) { return self.least_peak(most_stall_seconds, given, seed, num_rounds, control); });
          },
          "most_stall_seconds"_a, "starts"_a, "seed"_a, "num_rounds"_a, "limits"_a,
          "Blocks with the least peak found within that stall.");
}

}  // namespace olla::bindings
