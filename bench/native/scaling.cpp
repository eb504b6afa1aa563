// How every stage of planning grows with the graph: seconds and peak resident memory on generated training steps.
//
//     bench_scaling [--family convnet|transformer|tangle|tables|tree] [--clip] [--sizes 1000,10000] [--time-limit S] [--highs
//     LIBRARY]
//
// Each stage runs in a process of its own, so that its memory is its own; generating the graph is part of that memory, not of the
// time. Of short stages the fastest of three runs counts.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>

#include "generate.hpp"
#include "measure.hpp"
#include "olla/graph/profile.hpp"
#include "olla/ilp/address_ilp.hpp"
#include "olla/ilp/joint_ilp.hpp"
#include "olla/ilp/joint_program.hpp"
#include "olla/ilp/order_ilp.hpp"
#include "olla/ilp/order_program.hpp"
#include "olla/layout/greedy/best_fit.hpp"
#include "olla/layout/layout.hpp"
#include "olla/order/list_schedules.hpp"
#include "olla/order/order.hpp"

namespace olla::bench {
namespace {

struct Settings {
  StackOptions stack;
  std::vector<std::int64_t> sizes{300, 1'000, 3'000, 10'000, 30'000, 60'000, 100'000};
  double time_limit_seconds = 15;
  std::string highs;  // path of the HiGHS library; empty: the integer program is built, not solved
};

const char* name_of(Family family) {
  switch (family) {
    case Family::kConvnet:
      return "convnet";
    case Family::kTransformer:
      return "transformer";
    case Family::kTangle:
      return "tangle";
    case Family::kTables:
      return "tables";
    case Family::kTree:
      return "tree";
  }
  return "";
}

std::vector<OpId> program_order(const Graph& graph) {
  std::vector<OpId> order(graph.num_ops());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

OrderResult search(const Graph& graph, std::vector<OpId> start, const OrderOptions& options, double limit_seconds) {
  Control control("order", limit_seconds, nullptr);
  const std::vector<std::vector<OpId>> starts{std::move(start)};
  return order(graph, starts, options, control);
}

constexpr OrderOptions kRefineOnly{.num_restarts = 0, .max_nodes = 0};

// The stages. Each gets the step as generated and prepares what it needs outside the time it reports.
Measurement stage_graph(TrainingStep step, const Settings&) {
  Measurement m;
  std::optional<Graph> graph;
  m.seconds = seconds_of([&] { graph.emplace(std::move(step.data)); });
  note(m, "%d ops, %d tensors", graph->num_ops(), graph->num_tensors());
  return m;
}

Measurement stage_bound(TrainingStep step, const Settings& settings) {
  Measurement m;
  const Graph graph(std::move(step.data));
  const std::vector<OpId> order = hoisted_order(graph, step.first_update);
  Control control("bound", settings.time_limit_seconds, nullptr);
  Bytes bound = 0;
  m.seconds = seconds_of([&] { bound = lower_bound(graph, order, graph.num_ops(), control); });
  note(m, "%.3f %% below the hoisted order's peak", percent(profile(graph, order).peak, bound));
  return m;
}

Measurement ordering(const Graph& graph, std::vector<OpId> start, const OrderOptions& options, double limit_seconds) {
  Measurement m;
  const Bytes before = profile(graph, start).peak;
  OrderResult found;
  m.seconds = seconds_of([&] { found = search(graph, std::move(start), options, limit_seconds); });
  m.complete = found.status == Status::kOptimal || options.max_nodes == 0;
  note(m, "peak %.2f %% below the start's, gap %.3f %%, %lld cuts, %lld nodes", percent(before, found.peak),
       percent(found.peak, found.bound), static_cast<long long>(found.num_cuts), static_cast<long long>(found.num_nodes));
  return m;
}

Measurement stage_refine_program(TrainingStep step, const Settings& settings) {
  const Graph graph(std::move(step.data));
  return ordering(graph, program_order(graph), kRefineOnly, settings.time_limit_seconds);
}

Measurement stage_refine_hoisted(TrainingStep step, const Settings& settings) {
  const Graph graph(std::move(step.data));
  return ordering(graph, hoisted_order(graph, step.first_update), kRefineOnly, settings.time_limit_seconds);
}

Measurement stage_search(TrainingStep step, const Settings& settings) {
  const Graph graph(std::move(step.data));
  return ordering(graph, hoisted_order(graph, step.first_update), {}, settings.time_limit_seconds);
}

// The program as plan() would pose it after refinement, with the incumbent's peak as its target.
Measurement stage_ilp_build(TrainingStep step, const Settings& settings) {
  Measurement m;
  const Graph graph(std::move(step.data));
  const OrderResult found = search(graph, hoisted_order(graph, step.first_update), kRefineOnly, settings.time_limit_seconds);
  Control control("ilp", settings.time_limit_seconds, nullptr);
  std::optional<OrderProgram> program;
  const OrderProgramOptions options{.target = found.peak, .lower_bound = 0};
  m.seconds = seconds_of([&] { program.emplace(graph, options, [&] { return control.stop(found.peak, found.bound); }); });
  if (program->outcome() == OrderProgram::Outcome::kTooLarge) {
    m.complete = false;
    note(m, "left unbuilt: %lld nonzeros and more", static_cast<long long>(program->num_nonzeros()));
  } else {
    note(m, "%d columns, %d rows, %lld nonzeros", program->program().num_columns(), program->program().num_rows(),
         static_cast<long long>(program->num_nonzeros()));
  }
  return m;
}

constexpr std::ptrdiff_t kMostFirstFit = 20'000;  // its start, a first fit, is quadratic

Measurement left_out() {
  Measurement m;
  m.complete = false;
  note(m, "left out: no --highs library named");
  return m;
}

Measurement too_many(std::size_t num_buffers) {
  Measurement m;
  m.complete = false;
  note(m, "left out: %zu buffers", num_buffers);
  return m;
}

Measurement stage_ilp_solve(TrainingStep step, const Settings& settings) {
  Measurement m;
  if (settings.highs.empty()) return left_out();
  const Graph graph(std::move(step.data));
  const OrderResult found = search(graph, hoisted_order(graph, step.first_update), kRefineOnly, settings.time_limit_seconds);
  const Highs highs(settings.highs);
  Control control("ilp", settings.time_limit_seconds, nullptr);
  OrderIlpResult solved;
  m.seconds = seconds_of([&] { solved = order_ilp(graph, found.order, 0, highs, {}, control); });
  m.complete = solved.status == Status::kOptimal;
  note(m, "gap %.3f %%, %lld nodes, build %.2f s, solve %.2f s", percent(solved.peak, solved.lower_bound),
       static_cast<long long>(solved.figures.num_nodes), solved.figures.seconds_build, solved.figures.seconds_solve);
  return m;
}

// The written tensors, and which of them outlive the step.
std::vector<Buffer> arena_buffers(const Graph& graph, const std::vector<OpId>& order, std::vector<std::uint8_t>& outlives) {
  const Lifetimes lives = lifetimes(graph, order);
  std::vector<Buffer> buffers;
  for (TensorId t = 0; t < graph.num_tensors(); ++t) {
    if (graph.producer(t) == kNoOp) continue;
    buffers.push_back({lives.first[t], lives.last[t], graph.bytes(t)});
    outlives.push_back(graph.output(t) ? 1 : 0);
  }
  return buffers;
}

Bytes load_of(const std::vector<Buffer>& buffers, OpId num_ops, Bytes alignment) {
  std::vector<Bytes> change(static_cast<std::size_t>(num_ops) + 1, 0);
  for (const Buffer& b : buffers) {
    const Bytes size = (b.size + alignment - 1) / alignment * alignment;
    change[static_cast<std::size_t>(b.lower)] += size;
    change[static_cast<std::size_t>(b.upper)] -= size;
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  return *std::ranges::max_element(change);
}

// The second half of OLLA's split: an address program where first fit ends above the load.
Measurement stage_address_solve(TrainingStep step, const Settings& settings) {
  Measurement m;
  if (settings.highs.empty()) return left_out();
  const Graph graph(std::move(step.data));
  std::vector<std::uint8_t> outlives;
  const std::vector<Buffer> buffers = arena_buffers(graph, hoisted_order(graph, step.first_update), outlives);
  if (std::ssize(buffers) > kMostFirstFit) return too_many(buffers.size());
  const Highs highs(settings.highs);
  Control control("ilp", settings.time_limit_seconds, nullptr);
  AddressIlpResult solved;
  m.seconds = seconds_of([&] { solved = address_ilp(buffers, 512, {}, {}, 0, highs, {}, control); });
  m.complete = solved.status == Status::kOptimal;
  note(m, "%zu buffers, gap %.4f %%, %lld nodes, build %.2f s, solve %.2f s", buffers.size(), percent(solved.height, solved.bound),
       static_cast<long long>(solved.figures.num_nodes), solved.figures.seconds_build, solved.figures.seconds_solve);
  return m;
}

// OLLA's equation (9), from the refined order with the layout that plan() would start from.
Measurement stage_joint_solve(TrainingStep step, const Settings& settings) {
  Measurement m;
  if (settings.highs.empty()) return left_out();
  const Graph graph(std::move(step.data)), arena = arena_graph(graph, 512);
  const OrderResult found = search(arena, hoisted_order(graph, step.first_update), kRefineOnly, settings.time_limit_seconds);
  const std::vector<ArenaBuffer> held = olla::arena_buffers(arena, nullptr);
  Control placing("layout", settings.time_limit_seconds, nullptr);
  const LayoutResult placed = layout(lifetimes_of(held, found.order), {.alignment = 512}, placing);
  std::vector<Offset> offsets(arena.num_tensors(), kNotInArena), workspace_offsets(arena.num_ops(), kNotInArena);
  for (std::size_t i = 0; i < held.size(); ++i) {
    (held[i].tensor < 0 ? workspace_offsets[held[i].producer] : offsets[held[i].tensor]) = placed.offsets[i];
  }
  const Highs highs(settings.highs);
  Control control("ilp", settings.time_limit_seconds, nullptr);
  JointIlpResult solved;
  m.seconds = seconds_of([&] { solved = joint_ilp(arena, found.order, offsets, workspace_offsets, 0, highs, {}, control); });
  m.complete = solved.status == Status::kOptimal;
  if (!m.complete && solved.figures.num_nonzeros == 0) {
    note(m, "gap %.3f %%, left unbuilt", percent(solved.arena, solved.lower_bound));
    return m;
  }
  note(m, "gap %.3f %%, %lld nodes, %lld nonzeros, build %.2f s, solve %.2f s", percent(solved.arena, solved.lower_bound),
       static_cast<long long>(solved.figures.num_nodes), static_cast<long long>(solved.figures.num_nonzeros),
       solved.figures.seconds_build, solved.figures.seconds_solve);
  return m;
}

Measurement stage_smartpool(TrainingStep step, const Settings& settings) {
  Measurement m;
  const Graph graph(std::move(step.data));
  std::vector<std::uint8_t> outlives;
  const std::vector<Buffer> buffers = arena_buffers(graph, program_order(graph), outlives);
  Control control("layout", settings.time_limit_seconds, nullptr);
  FitResult found;
  m.seconds = seconds_of([&] { found = fit_in_order(buffers, smartpool_order(buffers, outlives), Hole::kBest, 512, control); });
  m.complete = control.seconds_left() > 0;
  note(m, "%zu buffers, height %.4f %% above the load", buffers.size(),
       percent(found.height, load_of(buffers, graph.num_ops(), 512)));
  return m;
}

template <std::vector<OpId> (*kSchedule)(const Graph&)>
Measurement stage_schedule(TrainingStep step, const Settings&) {
  Measurement m;
  const Graph graph(std::move(step.data));
  std::vector<OpId> order;
  m.seconds = seconds_of([&] { order = kSchedule(graph); });
  note(m, "peak %.2f %% below the program's", percent(profile(graph, program_order(graph)).peak, profile(graph, order).peak));
  return m;
}

Measurement stage_layout(TrainingStep step, const Settings& settings) {
  Measurement m;
  const Graph graph(std::move(step.data));
  std::vector<std::uint8_t> outlives;
  const std::vector<Buffer> buffers = arena_buffers(graph, hoisted_order(graph, step.first_update), outlives);
  Control control("layout", settings.time_limit_seconds, nullptr);
  LayoutResult found;
  const LayoutOptions options{.alignment = 512};
  m.seconds = seconds_of([&] { found = layout(buffers, options, control); });
  note(m, "%zu buffers, height %.4f %% above the load", buffers.size(), percent(found.height, found.load));
  return m;
}

struct Stage {
  const char* name;
  Measurement (*run)(TrainingStep, const Settings&);
};

constexpr Stage kStages[] = {
    {"graph", stage_graph},
    {"auto: bound", stage_bound},
    {"auto: refine, from program", stage_refine_program},
    {"auto: refine, from hoist", stage_refine_hoisted},
    {"auto: order", stage_search},
    {"auto: layout", stage_layout},
    {"ilp: order program, built", stage_ilp_build},
    {"ilp: order program, solved", stage_ilp_solve},
    {"ilp: address program, solved", stage_address_solve},
    {"joint: program, solved", stage_joint_solve},
    {"smartpool", stage_smartpool},
    {"inductor: least peak", stage_schedule<least_peak_order>},
    {"inductor: breadth", stage_schedule<breadth_first_order>},
    {"inductor: depth", stage_schedule<depth_first_order>},
};

int run(const Settings& settings) {
  std::printf("%s%s, time limit %g s per stage\n\n", name_of(settings.stack.family), settings.stack.clip ? " with clipping" : "",
              settings.time_limit_seconds);
  std::vector<Series> series;
  for (const Stage& stage : kStages) {
    series.push_back({stage.name, settings.sizes, [&](std::int64_t num_ops) {
                        StackOptions options = settings.stack;
                        options.num_ops = num_ops;
                        return stage.run(bench::stack(options), settings);
                      }});
  }
  return print_scaling("stage", "ops", series, settings.time_limit_seconds);
}

std::optional<Family> family_named(const std::string& name) {
  for (const Family family : {Family::kConvnet, Family::kTransformer, Family::kTangle, Family::kTables, Family::kTree}) {
    if (name == name_of(family)) return family;
  }
  return std::nullopt;
}

// False if an argument is not understood.
bool parse(int argc, char** argv, Settings& settings) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--clip") {
      settings.stack.clip = true;
      continue;
    }
    if (++i == argc) return false;
    const std::string value = argv[i];
    if (name == "--family" && family_named(value)) {
      settings.stack.family = *family_named(value);
    } else if (name == "--sizes") {
      settings.sizes = parse_sizes(value.c_str());
    } else if (name == "--time-limit") {
      settings.time_limit_seconds = std::atof(value.c_str());
    } else if (name == "--highs") {
      settings.highs = value;
    } else {
      return false;
    }
  }
  return !settings.sizes.empty() && settings.time_limit_seconds > 0;
}

}  // namespace
}  // namespace olla::bench

int main(int argc, char** argv) {
  olla::bench::Settings settings;
  if (!olla::bench::parse(argc, argv, settings)) {
    std::fprintf(
        stderr,
        "usage: bench_scaling [--family convnet|transformer|tangle|tables|tree] [--clip] [--sizes 1000,10000] [--time-limit S] [--highs LIBRARY]\n");
    return 2;
  }
  return olla::bench::run(settings);
}
