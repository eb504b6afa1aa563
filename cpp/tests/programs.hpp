// What tests of mixed-integer programs share.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

#include "olla/ilp/program.hpp"

namespace olla::test {

inline bool satisfies(const Program& p, const std::vector<double>& values) {
  for (Column j = 0; j < p.num_columns(); ++j) {
    if (values[j] < p.lower[j] || values[j] > p.upper[j] || (p.integer[j] != 0 && values[j] != std::floor(values[j]))) return false;
  }
  for (std::int32_t i = 0; i < p.num_rows(); ++i) {
    double activity = 0.0;
    for (std::int32_t k = p.row_start[i]; k < p.row_start[i + 1]; ++k) activity += p.value[k] * values[p.index[k]];
    if (activity < p.row_lower[i] || activity > p.row_upper[i]) return false;
  }
  return true;
}

inline double objective(const Program& p, const std::vector<double>& values) {
  double sum = 0.0;
  for (Column j = 0; j < p.num_columns(); ++j) sum += p.cost[j] * values[j];
  return sum;
}

// The library inside the highspy wheel, or nothing.
inline std::string highs_library() {
  const char* path = std::getenv("OLLA_HIGHS_LIBRARY");
  return path == nullptr ? "" : path;
}

inline constexpr int kSkipped = 77;

// A solver whose limit came before its next look at the clock ends on its own; LeakSanitizer fails where a thread ends under its
// scan at exit (github.com/google/sanitizers/issues/1353).
inline void wait_for_solvers() {
  const auto num_threads = [] {
    std::error_code nowhere;  // other systems than Linux do not tell
    const std::filesystem::directory_iterator threads("/proc/self/task", nowhere);
    return std::distance(begin(threads), end(threads));
  };
  for (int i = 0; i < 1000 && num_threads() > 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace olla::test

// In place of OLLA_TEST_MAIN where HiGHS is needed.
#define OLLA_HIGHS_TEST_MAIN                                                                               \
  int main() {                                                                                             \
    if (!olla::test::highs_library().empty()) {                                                            \
      const int status = olla::test::run();                                                                \
      olla::test::wait_for_solvers();                                                                      \
      return status;                                                                                       \
    }                                                                                                      \
    std::cerr << "skipped: set OLLA_HIGHS_LIBRARY to the HiGHS library (pip install \"highspy>=1.15\")\n"; \
    return olla::test::kSkipped;                                                                           \
  }
