// How time and memory grow with size: every measurement in a process of its own, a table, and fitted exponents.
#pragma once

#include <cstdio>
#include <functional>
#include <span>
#include <string>

#include "olla/base/types.hpp"

namespace olla::bench {

// What a process tells its parent. Plain memory: it travels through a pipe.
struct Measurement {
  double seconds = 0;
  bool complete = true;  // all the work was done, within its limits
  char note[120] = "";
};

struct Series {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::function<Measurement(std::int64_t size)> run;
};

double seconds_of(const std::function<void()>& run);
double percent(Bytes value, Bytes bound);  // how far the bound is below the value

template <class... Values>
void note(Measurement& m, const char* format, Values... values) {
  std::snprintf(m.note, sizeof m.note, format, values...);
}

// Prints a table of all series, and the exponents of what was complete. Of short measurements the fastest of three counts. Returns
// an exit status: 1 where a measurement failed.
int print_scaling(const char* series_word, const char* size_word, std::span<const Series> series, double time_limit_seconds);

// "1000,10000"; empty if it is not understood.
std::vector<std::int64_t> parse_sizes(const char* text);

}  // namespace olla::bench
