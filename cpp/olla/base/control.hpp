// How a long search is limited, watched and stopped.
#pragma once

#include <chrono>
#include <functional>
#include <limits>

#include "olla/base/types.hpp"

namespace olla {

struct Progress {
  const char* stage;  // "order", "layout", "ilp"
  double seconds;     // since the stage began
  Bytes value;        // best found so far: peak or height
  Bytes bound;        // proven lower bound so far
};

// Called now and then from the searching thread; false asks the search to stop with the best it has.
using ProgressFn = std::function<bool(const Progress&)>;

inline constexpr std::int64_t kAnyWork = std::numeric_limits<std::int64_t>::max();

// Limits on time and work and a stop request in one cheap question. The clock is read on every call, the callback is asked by the
// first one, and then ten times a second: a request that came before the search ends it at once. What a unit of work is, the search
// says that spends it; unlike time, it ends a search at the same place everywhere.
class Control {
 public:
  Control(const char* stage, double limit_seconds, ProgressFn progress, std::int64_t max_work = kAnyWork)
      : stage_(stage), limit_seconds_(limit_seconds), progress_(std::move(progress)), start_(Clock::now()), work_left_(max_work) {}

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double seconds_left() const { return limit_seconds_ - seconds(); }
  bool cancelled() const { return cancelled_; }
  void spend(std::int64_t work) { work_left_ -= work; }
  std::int64_t work_left() const { return work_left_; }

  // As stop(), of time alone, or of both, where the value and the bound are those of the last call.
  bool late() {
    const double now = seconds();
    if (progress_ && now >= next_report_) {
      next_report_ = now + 0.1;
      cancelled_ = cancelled_ || !progress_({stage_, now, value_, bound_});
    }
    return cancelled_ || now >= limit_seconds_;
  }
  bool over() { return late() || work_left_ <= 0; }

  // True once the search must end.
  bool stop(Bytes value, Bytes bound) {
    value_ = value;
    bound_ = bound;
    return over();
  }

 private:
  using Clock = std::chrono::steady_clock;
  const char* stage_;
  double limit_seconds_;
  ProgressFn progress_;
  Clock::time_point start_;
  std::int64_t work_left_;
  double next_report_ = 0;
  Bytes value_ = 0, bound_ = 0;
  bool cancelled_ = false;
};

}  // namespace olla
