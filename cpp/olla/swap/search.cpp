#include "olla/swap/search.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace olla {
namespace {

constexpr std::size_t kNumTrials = 6;      // blocks simulated per step of the greedy
constexpr double kRoundingSeconds = 1e-9;  // of sums of many times
constexpr int kNumBisections = 9;

}  // namespace

std::vector<IdleBlock> idle_blocks(const Graph& graph, std::span<const OpId> order, Bytes min_bytes,
                                   std::span<const TensorId> lasting) {
  std::vector<IdleBlock> blocks;
  std::vector<Step> first(graph.num_tensors(), -1);
  std::vector<Step> made(graph.num_tensors(), -1), last(graph.num_tensors(), -1);
  std::vector<std::uint8_t> changes(graph.num_tensors(), 0);
  for (Step s = 0; s < static_cast<Step>(order.size()); ++s) {
    const OpId v = order[s];
    for (const TensorId t : graph.data().mutates[v]) changes[t] = 1;
    for (const TensorId t : graph.uses(v)) {
      if (made[t] >= 0 && s > last[t] + 1 && graph.bytes(t) >= min_bytes)
        blocks.push_back({t, graph.bytes(t), made[t], last[t], s});
      last[t] = s;
      if (first[t] < 0) first[t] = s;
      if (changes[t]) made[t] = made[t] >= 0 ? s : -1;
    }
    for (const TensorId t : graph.data().mutates[v]) changes[t] = 0;
    for (const TensorId t : graph.writes(v)) made[t] = last[t] = s;
  }
  for (const TensorId t : lasting)
    if (first[t] >= 0 && graph.bytes(t) >= min_bytes) blocks.push_back({t, graph.bytes(t), last[t], last[t], first[t]});
  return blocks;
}

SwapSearch::SwapSearch(std::vector<Bytes> live, std::vector<double> seconds, std::vector<IdleBlock> blocks, const Link& link,
                       Bytes host_bytes)
    : live_(std::move(live)),
      seconds_(std::move(seconds)),
      steps_{live_, seconds_},
      blocks_(std::move(blocks)),
      link_(link),
      host_bytes_(host_bytes),
      begin_(live_.size() + 1) {
  std::partial_sum(seconds_.begin(), seconds_.end(), begin_.begin() + 1);
}

// The swaps of blocks in the order of their copies out, those in host memory from the start first; choice.block[i]: of swap i.
void SwapSearch::add_swaps(std::span<const std::int32_t> blocks, SwapChoice& choice) const {
  choice.swaps.clear(), choice.block.clear();
  for (const std::int32_t b : blocks) {
    const IdleBlock& block = blocks_[b];
    if (!block.wraps()) continue;
    choice.swaps.push_back({block.bytes, -1, -1, block.next, block.next});
    choice.block.push_back(b);
  }
  for (const std::int32_t b : blocks) {
    const IdleBlock& block = blocks_[b];
    const Step next = block.wraps() ? steps_.num() : block.next;
    choice.swaps.push_back({block.bytes, block.made, block.last, next, next});
    choice.block.push_back(b);
  }
}

SwapChoice SwapSearch::evaluate(std::span<const std::int32_t> blocks, Bytes limit, bool stalls, bool by_last) const {
  std::vector<std::int32_t> chosen(blocks.begin(), blocks.end());
  const auto key = [&](std::int32_t b) {
    const IdleBlock& x = blocks_[b];
    return by_last ? std::tuple(x.last, x.made, b) : std::tuple(x.made, x.last, b);
  };
  std::sort(chosen.begin(), chosen.end(), [&](std::int32_t a, std::int32_t b) { return key(a) < key(b); });
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  const Bytes bound = stalls ? limit : kNoLimit;
  SwapChoice choice;
  std::vector<std::uint8_t> out(blocks_.size(), 0);  // left out
  for (int round = 0; round < 3; ++round) {
    add_swaps(chosen, choice);
    issue_backwards(steps_, choice.swaps, link_, bound);
    // Swaps whose copy out cannot start before their copy in are left out; copies that waited for them then run earlier.
    Step ready = -1;
    for (std::size_t i = 0; i < choice.swaps.size(); ++i) {
      if (std::max(ready, choice.swaps[i].ready) >= choice.swaps[i].issue) out[choice.block[i]] = 1;
      if (out[choice.block[i]] == 0) ready = std::max(ready, choice.swaps[i].ready);
    }
    std::size_t kept = 0;
    for (std::size_t i = 0; i < choice.swaps.size(); ++i) {
      if (out[choice.block[i]] != 0) continue;
      choice.block[kept] = choice.block[i];
      choice.swaps[kept++] = choice.swaps[i];
    }
    choice.block.resize(kept);
    choice.swaps.resize(kept);
    choice.timeline = swap_timeline(steps_, choice.swaps, link_, bound);
    bool useless = false;
    for (std::size_t i = 0; i < kept; ++i) {
      if (choice.swaps[i].next == steps_.num() || choice.timeline.freed[i] < choice.swaps[i].issue) continue;
      out[choice.block[i]] = 1;
      useless = true;
    }
    if (!useless || round == 2) break;
    std::erase_if(chosen, [&](std::int32_t b) { return out[b] != 0; });
  }
  choice.excess = 0;
  for (const Bytes live : choice.timeline.live) choice.excess += static_cast<double>(std::max<Bytes>(0, live - limit));
  return choice;
}

SwapChoice SwapSearch::trial(std::span<const std::int32_t> blocks, Bytes limit, bool stalls, bool by_last, Control& control) const {
  control.spend(steps_.num());
  return evaluate(blocks, limit, stalls, by_last);
}

bool SwapSearch::allowed(const SwapChoice& choice, double most_stall_seconds) const {
  return choice.timeline.stall_seconds <= most_stall_seconds + kRoundingSeconds && choice.timeline.host_bytes <= host_bytes_;
}

double SwapSearch::score(const IdleBlock& block, Score rule, const Timeline& timeline, Bytes limit) const {
  const double around = block.wraps() ? begin_.back() : 0.0;
  const double absence =
      around + begin_[block.next] - begin_[block.last + 1] - link_.out_seconds(block.bytes) - link_.in_seconds(block.bytes);
  const double bytes = static_cast<double>(block.bytes);
  switch (rule) {
    case Score::kEarly:
      return -static_cast<double>(block.made);
    case Score::kLarge:
      return bytes;
    case Score::kArea:
      return absence > 0 ? absence * bytes : absence / bytes;
    case Score::kExcess: {
      double sum = 0;
      const auto add = [&](Step first, Step end) {
        for (Step s = first; s < end; ++s) sum += static_cast<double>(std::clamp<Bytes>(timeline.live[s] - limit, 0, block.bytes));
      };
      add(block.wraps() ? 0 : block.last + 1, block.next);
      if (block.wraps()) add(block.last + 1, steps_.num());
      return sum;
    }
  }
  return 0;
}

SwapChoice SwapSearch::grow(std::vector<std::int32_t> blocks, Bytes limit, double most_stall_seconds, const Rule& rule,
                            Control& control) {
  const bool stalls = most_stall_seconds > 0;
  SwapChoice best = trial(blocks, limit, stalls, rule.by_last, control);
  if (!allowed(best, most_stall_seconds)) best = trial({}, limit, stalls, rule.by_last, control);
  std::vector<std::uint8_t> refused(blocks_.size(), 0);
  std::vector<std::pair<double, std::int32_t>> found;
  std::uniform_real_distribution<double> uniform(1.0 - noise_, 1.0 + noise_);
  while (best.timeline.peak > limit && !control.stop(best.timeline.peak, 0)) {
    for (const std::int32_t b : best.block) refused[b] = 1;
    found.clear();
    const Step peak = best.timeline.peak_step;
    for (std::size_t b = 0; b < blocks_.size(); ++b)
      if (!refused[b] && blocks_[b].idle(peak))
        found.emplace_back(-score(blocks_[b], rule.score, best.timeline, limit) * uniform(random_), static_cast<std::int32_t>(b));
    if (found.empty()) break;
    const std::size_t num = std::min(kNumTrials, found.size());
    std::partial_sort(found.begin(), found.begin() + num, found.end());
    SwapChoice chosen;
    double most = 0;
    for (std::size_t k = 0; k < num; ++k) {
      const std::int32_t b = found[k].second;
      std::vector<std::int32_t> more = best.block;
      more.push_back(b);
      SwapChoice choice = trial(more, limit, stalls, rule.by_last, control);
      double gain = allowed(choice, most_stall_seconds) ? best.excess - choice.excess : 0.0;
      if (rule.per_byte) gain /= static_cast<double>(blocks_[b].bytes);
      if (gain <= 0) refused[b] = 1;
      if (gain > most) most = gain, chosen = std::move(choice);
    }
    if (most > 0) best = std::move(chosen);
  }
  return best;
}

void SwapSearch::shrink(SwapChoice& choice, Bytes limit, double most_stall_seconds, bool by_last, Control& control) const {
  std::vector<std::int32_t> blocks = choice.block;
  std::sort(blocks.begin(), blocks.end(), [&](std::int32_t a, std::int32_t b) { return blocks_[a].bytes < blocks_[b].bytes; });
  for (const std::int32_t b : blocks) {
    if (control.stop(choice.timeline.peak, 0)) return;
    std::vector<std::int32_t> fewer = choice.block;
    std::erase(fewer, b);
    SwapChoice rest = trial(fewer, limit, most_stall_seconds > 0, by_last, control);
    if (rest.timeline.peak <= choice.timeline.peak && rest.timeline.stall_seconds <= choice.timeline.stall_seconds &&
        allowed(rest, most_stall_seconds))
      choice = std::move(rest);
  }
}

SwapChoice SwapSearch::fit(Bytes limit, double most_stall_seconds, Control& control) {
  SwapChoice best = evaluate({}, limit, false, false);
  for (const Score score : {Score::kExcess, Score::kEarly, Score::kArea, Score::kLarge})
    for (const bool by_last : {true, false}) {
      SwapChoice choice = grow({}, limit, most_stall_seconds, {score, by_last, score == Score::kExcess}, control);
      if (choice.timeline.peak < best.timeline.peak) best = std::move(choice);
      if (best.timeline.peak <= limit || control.stop(best.timeline.peak, 0)) return best;
    }
  return best;
}

SwapChoice SwapSearch::least_peak(double most_stall_seconds, std::span<const std::vector<std::int32_t>> starts, std::uint64_t seed,
                                  int num_rounds, Control& control) {
  random_.seed(seed);
  noise_ = 0;
  SwapChoice best = evaluate({}, 0, false, false);
  bool by_last = true;
  const auto keep = [&](SwapChoice choice, bool order) {
    if (!allowed(choice, most_stall_seconds) || choice.timeline.peak >= best.timeline.peak) return;
    best = std::move(choice);
    by_last = order;
  };
  for (const std::vector<std::int32_t>& start : starts)
    for (const bool order : {true, false}) {
      keep(trial(start, 0, false, order, control), order);
      if (most_stall_seconds > 0) {
        Bytes low = 0, high = best.timeline.peak;
        for (int k = 0; k < 2 * kNumBisections; ++k) {  // the least limit at which these blocks stall no longer than allowed
          const Bytes limit = low + (high - low) / 2;
          SwapChoice choice = trial(start, limit, true, order, control);
          const bool fits = allowed(choice, most_stall_seconds) && choice.timeline.peak <= limit;
          (fits ? high : low) = limit;
          keep(std::move(choice), order);
        }
      }
    }
  Bytes low = 0, high = best.timeline.peak;
  for (int k = 0; k < kNumBisections && !control.stop(best.timeline.peak, 0); ++k) {
    const Bytes limit = low + (high - low) / 2;
    SwapChoice choice = fit(limit, most_stall_seconds, control);
    (choice.timeline.peak <= limit ? high : low) = limit;
    high = std::min(high, best.timeline.peak);
    keep(std::move(choice), true);
  }
  // Leave out a share of the blocks, at random, and choose again a little lower.
  constexpr Score kScores[] = {Score::kExcess, Score::kEarly, Score::kArea, Score::kLarge};
  noise_ = 0.3;
  for (int round = 0; round < num_rounds && !control.stop(best.timeline.peak, 0); ++round) {
    const Bytes limit = best.timeline.peak - std::max<Bytes>(1, best.timeline.peak >> (7 + round % 3));
    std::vector<std::int32_t> blocks = best.block;
    std::shuffle(blocks.begin(), blocks.end(), random_);
    blocks.resize(blocks.size() - blocks.size() / (2 + round % 4));
    const bool order = round % 5 != 0;
    keep(grow(std::move(blocks), limit, most_stall_seconds, {kScores[round % 4], order, round % 2 == 0}, control), order);
  }
  noise_ = 0;
  shrink(best, best.timeline.peak, most_stall_seconds, by_last, control);
  return best;
}

}  // namespace olla
