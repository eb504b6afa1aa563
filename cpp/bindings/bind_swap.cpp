#include "arrays.hpp"
#include "olla/base/error.hpp"
#include "olla/swap/search.hpp"

namespace olla::bindings {
namespace {

Link link_of(const Array<double>& numbers) {
  if (numbers.size() != 4) throw PlanError("a link is four numbers: bytes per second and latency out, the same in", "swap", {});
  return {numbers.data()[0], numbers.data()[1], numbers.data()[2], numbers.data()[3]};
}

template <class Field>
auto column(const std::vector<Swap>& swaps, Field field) {
  std::vector<std::decay_t<decltype(swaps[0].*field)>> values;
  for (const Swap& s : swaps) values.push_back(s.*field);
  return to_numpy(std::move(values));
}

nb::dict figures(Timeline t) {
  nb::dict d;
  d["start"] = to_numpy(std::move(t.start));
  d["out_start"] = to_numpy(std::move(t.out_start));
  d["out_end"] = to_numpy(std::move(t.out_end));
  d["in_start"] = to_numpy(std::move(t.in_start));
  d["in_end"] = to_numpy(std::move(t.in_end));
  d["freed"] = to_numpy(std::move(t.freed));
  d["live"] = to_numpy(std::move(t.live));
  d["peak_bytes"] = t.peak;
  d["peak_step"] = t.peak_step;
  d["stall_seconds"] = t.stall_seconds;
  d["host_bytes"] = t.host_bytes;
  return d;
}

std::vector<Swap> swaps_of(const Array<Bytes>& bytes, const Array<Step>& ready, const Array<Step>& last, const Array<Step>& issue,
                           const Array<Step>& next) {
  for (const std::size_t size : {ready.size(), last.size(), issue.size(), next.size()})
    if (size != bytes.size()) throw PlanError("the columns of the swaps have different lengths", "swap", {});
  std::vector<Swap> swaps;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    swaps.push_back({bytes.data()[i], ready.data()[i], last.data()[i], issue.data()[i], next.data()[i]});
  return swaps;
}

// Owns what a SwapSearch only refers to.
struct SwapRun {
  std::vector<Bytes> live;
  std::vector<double> seconds;
  std::vector<IdleBlock> blocks;
  Link link;
  Steps steps;
  SwapSearch search;

  SwapRun(std::vector<Bytes> bytes, std::vector<double> times, std::vector<IdleBlock> idle, const Link& speed, Bytes host)
      : live(std::move(bytes)),
        seconds(std::move(times)),
        blocks(std::move(idle)),
        link(speed),
        steps{live, seconds},
        search(steps, blocks, link, host) {}
};

std::vector<std::int32_t> valid(const SwapRun& self, const Array<std::int32_t>& blocks) {
  for (const std::int32_t b : view(blocks))
    if (b < 0 || static_cast<std::size_t>(b) >= self.blocks.size())
      throw PlanError("there is no idle block " + std::to_string(b), "swap", {b});
  return copy(blocks);
}

nb::tuple answer(SwapChoice choice) {
  nb::dict columns;
  columns["ready"] = column(choice.swaps, &Swap::ready);
  columns["last"] = column(choice.swaps, &Swap::last);
  columns["issue"] = column(choice.swaps, &Swap::issue);
  columns["next"] = column(choice.swaps, &Swap::next);
  return nb::make_tuple(to_numpy(std::move(choice.block)), columns, figures(std::move(choice.timeline)));
}

}  // namespace

void bind_swap(nb::module_& m) {
  m.def(
      "swap_timeline",
      [](Array<Bytes> live, Array<double> seconds, Array<Bytes> bytes, Array<Step> ready, Array<Step> last, Array<Step> issue,
         Array<Step> next, Array<double> link, Bytes limit) {
        const std::vector<Swap> swaps = swaps_of(bytes, ready, last, issue, next);
        const Link speed = link_of(link);
        Timeline t;
        {
          nb::gil_scoped_release release;
          t = swap_timeline({view(live), view(seconds)}, swaps, speed, limit);
        }
        return figures(std::move(t));
      },
      "live"_a.noconvert(), "seconds"_a.noconvert(), "bytes"_a.noconvert(), "ready"_a.noconvert(), "last"_a.noconvert(),
      "issue"_a.noconvert(), "next"_a.noconvert(), "link"_a.noconvert(), "limit"_a,
      "When swaps run beside ops; see cpp/olla/swap/timeline.hpp.");
  m.def(
      "idle_blocks",
      [](const Graph& graph, Array<OpId> order, Bytes min_bytes, Array<TensorId> lasting) {
        if (!graph.is_order(view(order))) throw GraphError("the order is no order of the graph", "program_order", {});
        std::vector<TensorId> tensor;
        std::vector<Step> made, last, next;
        for (const TensorId t : view(lasting))
          if (t < 0 || t >= graph.num_tensors()) throw GraphError("there is no tensor " + std::to_string(t), "ids", {t});
        for (const IdleBlock& b : idle_blocks(graph, view(order), min_bytes, view(lasting))) {
          tensor.push_back(b.tensor);
          made.push_back(b.made);
          last.push_back(b.last);
          next.push_back(b.next);
        }
        return nb::make_tuple(to_numpy(std::move(tensor)), to_numpy(std::move(made)), to_numpy(std::move(last)),
                              to_numpy(std::move(next)));
      },
      "graph"_a, "order"_a.noconvert(), "min_bytes"_a, "lasting"_a.noconvert(),
      "(tensor, made, last, next) of every gap between two uses, steps of the order; next <= last: of a lasting one, to the next step.");
  nb::class_<SwapRun>(m, "SwapSearch", "Which idle blocks to copy to host memory; see olla.swap.")
      .def(
          "__init__",
          [](SwapRun* self, Array<Bytes> live, Array<double> seconds, Array<TensorId> tensor, Array<Bytes> bytes, Array<Step> made,
             Array<Step> last, Array<Step> next, Array<double> link, Bytes host_bytes) {
            const std::vector<Swap> swaps = swaps_of(bytes, made, last, next, next);
            const auto n = static_cast<Step>(live.size());
            swap_timeline({view(live), view(seconds)}, {}, link_of(link), kNoLimit);  // the lengths of the steps
            if (tensor.size() != swaps.size()) throw PlanError("the columns of the swaps have different lengths", "swap", {});
            std::vector<IdleBlock> blocks;
            for (std::size_t i = 0; i < swaps.size(); ++i) {
              const Swap& s = swaps[i];
              if (s.bytes < 0 || s.ready < 0 || s.ready > s.last || s.last + 1 == s.next || s.next < 0 ||
                  std::max(s.last, s.next) >= n)
                throw PlanError("idle block " + std::to_string(i) + " is out of its range", "swap", {static_cast<std::int64_t>(i)});
              blocks.push_back({tensor.data()[i], s.bytes, s.ready, s.last, s.next});
            }
            new (self) SwapRun(copy(live), copy(seconds), std::move(blocks), link_of(link), host_bytes);
          },
          "live"_a.noconvert(), "seconds"_a.noconvert(), "tensor"_a.noconvert(), "bytes"_a.noconvert(), "made"_a.noconvert(),
          "last"_a.noconvert(), "next"_a.noconvert(), "link"_a.noconvert(), "host_bytes"_a)
      .def(
          "evaluate",
          [](const SwapRun& self, Array<std::int32_t> blocks, Bytes limit, bool stalls, bool by_last) {
            return answer(self.search.evaluate(valid(self, blocks), limit, stalls, by_last));
          },
          "blocks"_a.noconvert(), "limit"_a, "stalls"_a, "by_last"_a, "(blocks that fit, their swaps, timeline) of these blocks.")
      .def(
          "fit",
          [](SwapRun& self, Bytes limit, double most_stall_seconds, double time_limit, nb::object progress, std::int64_t max_work) {
            PythonProgress callback(std::move(progress));
            Control control("swap", time_limit, callback.function(), max_work);
            SwapChoice choice;
            {
              nb::gil_scoped_release release;
              choice = self.search.fit(limit, most_stall_seconds, control);
            }
            callback.raise_pending();
            return answer(std::move(choice));
          },
          "limit"_a, "most_stall_seconds"_a, "time_limit"_a, "progress"_a.none(), "max_work"_a = kAnyWork,
          "Blocks with which the peak is at most the limit, or the best found.")
      .def(
          "least_peak",
          [](SwapRun& self, double most_stall_seconds, nb::list starts, std::uint64_t seed, int num_rounds, double time_limit,
             nb::object progress, std::int64_t max_work) {
            std::vector<std::vector<std::int32_t>> given;
            for (nb::handle start : starts) given.push_back(valid(self, nb::cast<Array<std::int32_t>>(start)));
            PythonProgress callback(std::move(progress));
            Control control("swap", time_limit, callback.function(), max_work);
            SwapChoice choice;
            {
              nb::gil_scoped_release release;
              choice = self.search.least_peak(most_stall_seconds, given, seed, num_rounds, control);
            }
            callback.raise_pending();
            return answer(std::move(choice));
          },
          "most_stall_seconds"_a, "starts"_a, "seed"_a, "num_rounds"_a, "time_limit"_a, "progress"_a.none(),
          "max_work"_a = kAnyWork, "Blocks with the least peak found within that stall.");
}

}  // namespace olla::bindings
