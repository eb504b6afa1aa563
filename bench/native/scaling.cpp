// How every stage of planning grows with the graph: seconds and peak resident memory on generated training steps.
//
//     bench_scaling [--family convnet|transformer|tangle] [--clip] [--sizes 1000,10000] [--time-limit S] [--highs LIBRARY]
//
// Each stage runs in a process of its own, so that its memory is its own; generating the graph is part of that memory, not of the
// time. Of short stages the fastest of three runs counts.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "generate.hpp"
#include "olla/bestfit.hpp"
#include "olla/ilp.hpp"
#include "olla/inductor.hpp"
#include "olla/layout.hpp"
#include "olla/order.hpp"
#include "olla/order_program.hpp"
#include "olla/profile.hpp"

namespace olla::bench {
namespace {

struct Settings {
  StackOptions stack;
  std::vector<std::int64_t> sizes{300, 1'000, 3'000, 10'000, 30'000, 60'000, 100'000};
  double time_limit_seconds = 15;
  std::string highs;  // path of the HiGHS library; empty: the integer program is built, not solved
};

// What a stage's process tells its parent. Plain memory: it travels through a pipe.
struct Measurement {
  double seconds = 0;
  bool complete = true;  // the stage did all its work, within its limits
  char note[120] = "";
};

const char* name_of(Family family) {
  return family == Family::kConvnet ? "convnet" : family == Family::kTransformer ? "transformer" : "tangle";
}

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class... Values>
void note(Measurement& m, const char* format, Values... values) {
  std::snprintf(m.note, sizeof m.note, format, values...);
}

double percent(Bytes value, Bytes bound) {
  return value == 0 ? 0 : 100.0 * static_cast<double>(value - bound) / static_cast<double>(value);
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

Measurement stage_ilp_solve(TrainingStep step, const Settings& settings) {
  Measurement m;
  if (settings.highs.empty()) {
    m.complete = false;
    note(m, "left out: no --highs library named");
    return m;
  }
  const Graph graph(std::move(step.data));
  const OrderResult found = search(graph, hoisted_order(graph, step.first_update), kRefineOnly, settings.time_limit_seconds);
  const Highs highs(settings.highs);
  Control control("ilp", settings.time_limit_seconds, nullptr);
  OrderIlpResult solved;
  m.seconds = seconds_of([&] { solved = order_ilp(graph, found.order, 0, highs, {}, control); });
  m.complete = solved.status == Status::kOptimal;
  note(m, "gap %.3f %%, %lld nodes, build %.2f s, solve %.2f s", percent(solved.peak, solved.lower_bound),
       static_cast<long long>(solved.num_nodes), solved.seconds_build, solved.seconds_solve);
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

Measurement stage_smartpool(TrainingStep step, const Settings& settings) {
  Measurement m;
  const Graph graph(std::move(step.data));
  std::vector<std::uint8_t> outlives;
  const std::vector<Buffer> buffers = arena_buffers(graph, program_order(graph), outlives);
  Control control("layout", settings.time_limit_seconds, nullptr);
  FitResult found;
  m.seconds = seconds_of([&] { found = fit_in_order(buffers, smartpool_order(buffers, outlives), Fit::kBest, 512, control); });
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
    {"bound", stage_bound},
    {"refine from program", stage_refine_program},
    {"refine from hoist", stage_refine_hoisted},
    {"search with branching", stage_search},
    {"ilp build", stage_ilp_build},
    {"ilp solve", stage_ilp_solve},
    {"layout", stage_layout},
    {"smartpool", stage_smartpool},
    {"inductor: least peak", stage_schedule<least_peak_order>},
    {"inductor: breadth", stage_schedule<breadth_first_order>},
    {"inductor: depth", stage_schedule<depth_first_order>},
};

struct Outcome {
  Measurement measurement;
  double peak_mib = 0;
  bool failed = false;
};

// Runs one stage in a child process and waits for it.
Outcome run_apart(const Stage& stage, const Settings& settings, std::int64_t num_ops) {
  int channel[2];
  if (pipe(channel) != 0) std::abort();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    StackOptions options = settings.stack;
    options.num_ops = num_ops;
    try {
      const Measurement m = stage.run(bench::stack(options), settings);
      _exit(write(channel[1], &m, sizeof m) == sizeof m ? 0 : 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s at %lld ops: %s\n", stage.name, static_cast<long long>(num_ops), error.what());
      _exit(1);
    }
  }
  close(channel[1]);
  Outcome outcome;
  outcome.failed = child < 0 || read(channel[0], &outcome.measurement, sizeof(Measurement)) != sizeof(Measurement);
  close(channel[0]);
  int status = 0;
  rusage usage{};
  if (child > 0) wait4(child, &status, 0, &usage);
  outcome.failed = outcome.failed || status != 0;
#ifdef __APPLE__
  outcome.peak_mib = static_cast<double>(usage.ru_maxrss) / (1 << 20);
#else
  outcome.peak_mib = static_cast<double>(usage.ru_maxrss) / (1 << 10);
#endif
  return outcome;
}

// Slope of log seconds over log ops, by least squares; what takes less than a millisecond tells nothing. NaN below two sizes.
double growth_exponent(const std::vector<std::pair<double, double>>& points) {
  double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& [ops, seconds] : points) {
    if (seconds < 1e-3) continue;
    const double x = std::log(ops), y = std::log(seconds);
    n += 1, sx += x, sy += y, sxx += x * x, sxy += x * y;
  }
  return n < 2 ? std::nan("") : (n * sxy - sx * sy) / (n * sxx - sx * sx);
}

int run(const Settings& settings) {
  std::printf("%s%s, time limit %g s per stage\n\n", name_of(settings.stack.family), settings.stack.clip ? " with clipping" : "",
              settings.time_limit_seconds);
  std::printf("| stage | ops | seconds | peak MiB | |\n|---|---|---|---|---|\n");
  bool failed = false;
  std::string exponents;
  for (const Stage& stage : kStages) {
    std::vector<std::pair<double, double>> points;
    for (const std::int64_t num_ops : settings.sizes) {
      Outcome o = run_apart(stage, settings, num_ops);
      for (int repeat = 1; repeat < 3 && !o.failed && o.measurement.seconds < 0.3; ++repeat) {
        const Outcome again = run_apart(stage, settings, num_ops);
        if (again.failed || again.measurement.seconds < o.measurement.seconds) o = again;
      }
      failed = failed || o.failed;
      std::printf("| %s | %lld | %.4f | %.0f | %s |\n", stage.name, static_cast<long long>(num_ops), o.measurement.seconds,
                  o.peak_mib, o.failed ? "FAILED" : o.measurement.note);
      std::fflush(stdout);
      const bool complete = o.measurement.complete && o.measurement.seconds < settings.time_limit_seconds;
      if (!o.failed && complete) points.emplace_back(static_cast<double>(num_ops), o.measurement.seconds);
    }
    const double exponent = growth_exponent(points);
    char line[80];
    std::snprintf(line, sizeof line, std::isnan(exponent) ? "| %s | - |\n" : "| %s | %.2f |\n", stage.name, exponent);
    exponents += line;
  }
  std::printf("\n| stage | seconds grow as ops to the power, where complete |\n|---|---|\n%s", exponents.c_str());
  return failed ? 1 : 0;
}

std::vector<std::int64_t> parse_sizes(const char* text) {
  std::vector<std::int64_t> sizes;
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    sizes.push_back(std::strtoll(text, &end, 10));
    if (end == text || sizes.back() < 1) return {};
  }
  return sizes;
}

std::optional<Family> family_named(const std::string& name) {
  for (const Family family : {Family::kConvnet, Family::kTransformer, Family::kTangle}) {
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
        "usage: bench_scaling [--family convnet|transformer|tangle] [--clip] [--sizes 1000,10000] [--time-limit S] [--highs LIBRARY]\n");
    return 2;
  }
  return olla::bench::run(settings);
}
