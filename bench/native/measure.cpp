#include "measure.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>

namespace olla::bench {
namespace {

struct Outcome {
  Measurement measurement;
  double peak_mib = 0;
  bool failed = false;
};

// Runs in a child process and waits for it.
Outcome run_apart(const Series& series, std::int64_t size) {
  int channel[2];
  if (pipe(channel) != 0) std::abort();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    try {
      const Measurement m = series.run(size);
      _exit(write(channel[1], &m, sizeof m) == sizeof m ? 0 : 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s at %lld: %s\n", series.name.c_str(), static_cast<long long>(size), error.what());
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

using Points = std::vector<std::pair<double, double>>;  // size, value

// Slope of log value over log size, by least squares; values below the least tell nothing. A dash below two sizes.
std::string growth_exponent(const Points& points, double least) {
  double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& [size, value] : points) {
    if (value < least) continue;
    const double x = std::log(size), y = std::log(value);
    n += 1, sx += x, sy += y, sxx += x * x, sxy += x * y;
  }
  if (n < 2) return "-";
  char text[20];
  std::snprintf(text, sizeof text, "%.2f", (n * sxy - sx * sy) / (n * sxx - sx * sx));
  return text;
}

}  // namespace

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double percent(Bytes value, Bytes bound) {
  return value == 0 ? 0 : 100.0 * static_cast<double>(value - bound) / static_cast<double>(value);
}

int print_scaling(const char* series_word, const char* size_word, std::span<const Series> series, double time_limit_seconds) {
  std::printf("| %s | %s | seconds | peak MiB | |\n|---|---|---|---|---|\n", series_word, size_word);
  bool failed = false;
  std::string exponents;
  for (const Series& one : series) {
    Points seconds, mib;
    for (const std::int64_t size : one.sizes) {
      Outcome o = run_apart(one, size);
      for (int repeat = 1; repeat < 3 && !o.failed && o.measurement.seconds < 0.3; ++repeat) {
        const Outcome again = run_apart(one, size);
        if (again.failed || again.measurement.seconds < o.measurement.seconds) o = again;
      }
      failed = failed || o.failed;
      std::printf("| %s | %lld | %.4f | %.0f | %s |\n", one.name.c_str(), static_cast<long long>(size), o.measurement.seconds,
                  o.peak_mib, o.failed ? "FAILED" : o.measurement.note);
      std::fflush(stdout);
      if (o.failed || !o.measurement.complete || o.measurement.seconds >= time_limit_seconds) continue;
      seconds.emplace_back(static_cast<double>(size), o.measurement.seconds);
      mib.emplace_back(static_cast<double>(size), o.peak_mib);
    }
    constexpr double kLeastSeconds = 1e-3, kLeastMib = 10;
    exponents +=
        "| " + one.name + " | " + growth_exponent(seconds, kLeastSeconds) + " | " + growth_exponent(mib, kLeastMib) + " |\n";
  }
  std::printf("\n| %s | seconds grow as %s to the power, where complete | memory |\n|---|---|---|\n%s", series_word, size_word,
              exponents.c_str());
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

}  // namespace olla::bench
