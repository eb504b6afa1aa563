// How layouts grow with the number of buffers: seconds and peak resident memory on generated sets, one family after the other.
//
//     bench_scaling_layout [--sizes 1000,10000] [--time-limit S] [--threads N]
//
// Each set runs in a process of its own; generating it is part of the memory, not of the time. The sets are kin to those of
// tests/support/buffers.py, not the same.
#include <algorithm>
#include <cstdlib>
#include <queue>
#include <random>

#include "measure.hpp"
#include "olla/layout/layout.hpp"

namespace olla::bench {
namespace {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : bits_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {  // both inclusive
    return low + static_cast<std::int64_t>(bits_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

 private:
  std::mt19937_64 bits_;
};

// Activations that nest, temporaries, gradients; segments of so many layers are recomputed before their
// backward (0: none are).
std::vector<Buffer> step(std::int64_t count, std::int64_t segment) {
  Draw draw(1);
  const std::int64_t layers = std::max<std::int64_t>(1, count / (segment > 0 ? 6 : 5));
  std::vector<Bytes> sizes;
  for (std::int64_t i = 0; i < layers; ++i) sizes.push_back(512 * draw.between(1, 64) * (draw.chance(25) ? 4 : 1));
  std::vector<Buffer> buffers;
  std::vector<std::int64_t> birth(layers);
  std::int64_t now = 0;
  const auto forward = [&](std::int64_t i, bool keep) {
    birth[i] = now;
    if (!keep) buffers.push_back({now, now + 2, sizes[i]});
    buffers.push_back({now, now + draw.between(1, 3), 512 * draw.between(1, 64)});
    ++now;
  };
  for (std::int64_t i = 0; i < layers; ++i) forward(i, segment == 0);
  const std::int64_t width = segment == 0 ? layers : segment;
  for (std::int64_t end = layers; end > 0; end -= std::min(end, width)) {
    const std::int64_t begin = std::max<std::int64_t>(0, end - width);
    if (segment > 0) {
      for (std::int64_t i = begin; i < end; ++i) forward(i, true);
    }
    for (std::int64_t i = end - 1; i >= begin; --i, ++now) {
      buffers.push_back({birth[i], now + 1, sizes[i]});
      buffers.push_back({now, now + 2, sizes[i]});
      buffers.push_back({now, now + draw.between(1, 2), 512 * draw.between(1, 64)});
    }
  }
  return buffers;
}

// One stage of a pipeline, one forward and one backward in turn, a few microbatches ahead.
std::vector<Buffer> pipeline(std::int64_t count) {
  Draw draw(2);
  constexpr std::int64_t kKernels = 16, kAhead = 6;
  std::vector<Bytes> saved, scratch;
  for (std::int64_t k = 0; k < kKernels; ++k) {
    saved.push_back(512 * draw.between(1, 400));
    scratch.push_back(512 * draw.between(1, 200));
  }
  const std::int64_t batches = std::max(kAhead + 1, count / (3 * kKernels));
  std::vector<Buffer> buffers;
  std::vector<std::int64_t> birth(batches);
  std::int64_t now = 0;
  const auto forward = [&](std::int64_t batch) {
    birth[batch] = now;
    for (const Bytes size : scratch) buffers.push_back({now, now + 1, size}), ++now;
  };
  for (std::int64_t batch = 0; batch < kAhead; ++batch) forward(batch);
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    if (batch + kAhead < batches) forward(batch + kAhead);
    for (std::int64_t k = kKernels - 1; k >= 0; --k, ++now) {
      buffers.push_back({birth[batch] + k, now + 1, saved[k]});
      buffers.push_back({now, now + 2, scratch[k]});
    }
  }
  return buffers;
}

std::vector<Buffer> scattered(std::int64_t count) {
  Draw draw(3);
  std::vector<Buffer> buffers;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t lower = draw.between(0, 2 * count), magnitude = draw.between(0, 13);
    buffers.push_back(
        {lower, lower + draw.between(1, std::int64_t{1} << magnitude), draw.between(1, std::int64_t{1} << draw.between(5, 20))});
  }
  return buffers;
}

// A rectangle cut from edge to edge, the largest piece first: the least height is that of the rectangle, 2^20.
std::vector<Buffer> tight(std::int64_t count) {
  Draw draw(4);
  const auto area = [](const Buffer& b) { return (b.upper - b.lower) * b.size; };
  const auto smaller = [&](const Buffer& a, const Buffer& b) { return area(a) < area(b); };
  std::priority_queue<Buffer, std::vector<Buffer>, decltype(smaller)> pieces(smaller);
  pieces.push({0, 4 * count, 1 << 20});
  std::vector<Buffer> buffers;
  while (std::ssize(buffers) + static_cast<std::int64_t>(pieces.size()) < count) {
    Buffer a = pieces.top(), b = a;
    pieces.pop();
    const bool across_time = draw.between(1, b.upper - b.lower + b.size / 4096) <= b.upper - b.lower;
    if (across_time && b.upper - b.lower > 1) {
      a.upper = b.lower = draw.between(b.lower + 1, b.upper - 1);
    } else if (b.size > 1) {
      a.size = draw.between(1, b.size - 1);
      b.size -= a.size;
    } else {
      buffers.push_back(a);
      continue;
    }
    pieces.push(a);
    pieces.push(b);
  }
  for (; !pieces.empty(); pieces.pop()) buffers.push_back(pieces.top());
  return buffers;
}

struct Settings {
  std::vector<std::int64_t> sizes{1'000, 3'000, 10'000, 30'000, 100'000, 300'000, 1'000'000};
  double time_limit_seconds = 10;
  int num_threads = 1;
};

// Complete when the height equals the bound, or, of a greedy pass alone, always.
Measurement measured(const std::vector<Buffer>& buffers, LayoutOptions options, const Settings& settings) {
  Measurement m;
  options.num_threads = settings.num_threads;
  Control control("layout", settings.time_limit_seconds, nullptr);
  LayoutResult found;
  m.seconds = seconds_of([&] { found = layout(buffers, options, control); });
  m.complete = found.status == Status::kOptimal || !options.use_squeaky_wheel;
  note(m, "%zu buffers, height %.4f %% above the load%s", buffers.size(), percent(found.height, found.load),
       found.status == Status::kOptimal ? ", optimal" : "");
  return m;
}

int run(const Settings& settings) {
  std::printf("time limit %g s, %d thread%s\n\n", settings.time_limit_seconds, settings.num_threads,
              settings.num_threads == 1 ? "" : "s");
  const LayoutOptions search, greedy{.use_squeaky_wheel = false, .use_neighbourhood = false};
  using Make = std::function<std::vector<Buffer>(std::int64_t)>;
  const auto series = [&](const char* name, const Make& make, const LayoutOptions& options,
                          const std::vector<std::int64_t>& sizes) {
    return Series{name, sizes, [=](std::int64_t size) { return measured(make(size), options, settings); }};
  };
  const auto steps_with = [](std::int64_t segment) { return [=](std::int64_t count) { return step(count, segment); }; };
  const std::vector<Series> all{
      series("training", steps_with(0), search, settings.sizes),
      series("recomputation", steps_with(32), search, settings.sizes),
      series("pipeline", pipeline, search, settings.sizes),
      series("random, greedy rules alone", scattered, greedy, settings.sizes),
      series("tight, greedy rules alone", tight, greedy, settings.sizes),
      series("tight, to the proof", tight, search, {25, 50, 100, 150, 200, 300, 500}),
  };
  return print_scaling("family", "buffers asked for", all, settings.time_limit_seconds);
}

// False if an argument is not understood.
bool parse(int argc, char** argv, Settings& settings) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--sizes") {
      settings.sizes = parse_sizes(value.c_str());
    } else if (name == "--time-limit") {
      settings.time_limit_seconds = std::atof(value.c_str());
    } else if (name == "--threads") {
      settings.num_threads = std::atoi(value.c_str());
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && !settings.sizes.empty() && settings.time_limit_seconds > 0 && settings.num_threads > 0;
}

}  // namespace
}  // namespace olla::bench

int main(int argc, char** argv) {
  olla::bench::Settings settings;
  if (!olla::bench::parse(argc, argv, settings)) {
    std::fprintf(stderr, "usage: bench_scaling_layout [--sizes 1000,10000] [--time-limit S] [--threads N]\n");
    return 2;
  }
  return olla::bench::run(settings);
}
