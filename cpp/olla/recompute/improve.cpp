#include "olla/recompute/improve.hpp"

#include <random>

namespace olla {
namespace {

constexpr double kNoise = 0.4;  // most random noise on scores in a repair, as a share
constexpr double kSpread = 4;   // how strongly a repair prefers values idle under several peaks
constexpr int kMaxSettling = 4;

// Undoes the last decisions as far as they did not lower the peak: each only removed one of several equal peaks.
void trim(Evictor& evictor) {
  const auto& curve = evictor.curve();
  std::size_t last = curve.size() - 1;
  while (last > 0 && curve[last - 1].peak == curve.back().peak) --last;
  auto decisions = evictor.decisions();
  if (curve[last].num_decisions == decisions.size()) return;
  decisions.resize(curve[last].num_decisions);
  evictor.reset(std::move(decisions));
}

// Deletion and the greedy in turn, until neither gains.
void settle(Evictor& evictor, const Target& target, Control& control) {
  for (int i = 0; i < kMaxSettling && !control.stop(evictor.rewrite().peak, 0); ++i) {
    const Bytes peak = evictor.rewrite().peak;
    const double seconds = evictor.rewrite().added_seconds;
    evictor.reverse(target.least_time ? target.peak : peak, control);
    if (target.least_time) {
      if (evictor.rewrite().peak > target.peak) evictor.run({target.peak, 1e30}, control);
      if (evictor.rewrite().added_seconds >= seconds) return;
    } else {
      evictor.run({0, target.added_seconds}, control);
      trim(evictor);
      if (evictor.rewrite().peak >= peak) return;
    }
  }
}

}  // namespace

void improve(Evictor& evictor, const Target& target, std::uint64_t seed, int max_rounds, Control& control,
             std::span<const std::vector<Decision>> seeds) {
  std::mt19937_64 random(seed);
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  if (!evictor.front().best(target)) return;
  const auto best = [&] { return *evictor.front().best(target); };
  const auto run = [&] {
    const double seconds = target.least_time ? best().point.added_seconds : target.added_seconds;
    evictor.run({target.least_time ? target.peak : 0, seconds}, control);
  };
  if (!target.least_time) trim(evictor);
  settle(evictor, target, control);
  for (const std::vector<Decision>& start : seeds) {
    control.spend(evictor.rewrite().num_runs());
    if (control.stop(best().point.peak, 0) || !evictor.reset(start)) continue;
    run();
    settle(evictor, target, control);
  }
  evictor.reset(best().decisions());
  for (int round = 0; round < max_rounds && !control.stop(best().point.peak, 0); ++round) {
    const Front::Choice found = best();
    const double share = uniform() < 0.2 ? 1.0 : 0.05 + 0.4 * uniform();
    std::vector<Decision> rest;
    for (const Decision& decision : found.decisions()) {
      if (uniform() >= share) rest.push_back(decision);
    }
    control.spend(evictor.rewrite().num_runs());
    if (!evictor.reset(std::move(rest))) continue;  // some are valid only with what was taken away
    const double spread = uniform() < 0.5 ? 0 : kSpread * uniform();
    evictor.set_score_weights({kNoise * uniform(), spread, found.point.peak - found.point.peak / 50, random()});
    run();
    evictor.set_score_weights({});
    if (!target.least_time) trim(evictor);
    const Bytes close = target.least_time ? target.peak : best().point.peak + best().point.peak / 100;
    if (evictor.rewrite().peak <= close) settle(evictor, target, control);
  }
  evictor.set_score_weights({});
  evictor.reset(best().decisions());
}

}  // namespace olla
