#include "olla/layout/exact/ladder.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

namespace olla {
namespace {

constexpr std::int64_t kNodesAlone = 4000;         // not worth more threads
constexpr int kFirstShift = 3, kShiftPerRung = 2;  // steps of 1/8 and 1/2 of what there is to gain, then all of it
constexpr std::int64_t kLowShare = 4;              // low capacities fit more rarely: they get so many times fewer nodes

}  // namespace

ExactSearch& Ladder::search(std::size_t thread) {
  while (searches_.size() <= thread) {
    searches_.push_back(std::make_unique<ExactSearch>(part_, ExactRules{}, seed_ + searches_.size()));
  }
  return *searches_[thread];
}

// First the lowest capacity (rung), which often fits. Then rounds of capacities downwards, so that remembered failures hold for
// the next one, and weights learned above guide the search below: a step down is repeated while it fits and grows when it does
// not, until the lowest rung has been tried. Nodes double from round to round.
void Ladder::lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best) {
  bool stopped = false;
  const auto asked = [&] { return stopped = stopped || stop(best.height); };
  const std::int64_t end = num_nodes_ + max_nodes;
  const int first_shift = is_decision_ ? 0 : kFirstShift;
  while (num_nodes_ < end && !asked()) {
    const Bytes lowest = std::max(enough, bound_);
    if (best.height <= lowest || (is_decision_ && bound_ > enough)) return;
    const Bytes step = shift_ == 0 ? best.height - lowest : std::max<Bytes>(1, (best.height - lowest) >> shift_);
    const std::int64_t nodes = shift_ == first_shift ? rung_nodes_ : rung_nodes_ / kLowShare;
    const Fit fit = decide(best.height - step, std::min(nodes, end - num_nodes_), asked, best);
    if (fit == Fit::kFits) continue;
    if (fit == Fit::kNever) bound_ = std::max(bound_, best.height - step + 1);
    const bool is_lowest = shift_ == 0;
    shift_ = is_lowest ? first_shift : std::max(0, shift_ - kShiftPerRung);
    if (is_lowest) rung_nodes_ *= 2;
  }
}

Fit Ladder::decide(Bytes capacity, std::int64_t max_nodes, const std::function<bool()>& stop, Packing& best) {
  std::size_t winner = 0;
  const std::int64_t before = search(0).num_nodes();
  Fit fit = search(0).decide(capacity, {num_threads_ > 1 ? std::min(max_nodes, kNodesAlone) : max_nodes, stop});
  const std::int64_t left = max_nodes - kNodesAlone;
  if (fit == Fit::kUnknown && num_threads_ > 1 && left > 0 && !stop()) fit = decide_together(capacity, left, stop, winner);
  num_nodes_ += std::max<std::int64_t>(1, search(0).num_nodes() - before);
  if (fit != Fit::kFits) return fit;
  const std::vector<Offset>& offsets = search(winner).offsets();
  if (const Bytes height = height_of(part_, offsets); height < best.height) best = {offsets, height};
  return fit;
}

// Every thread with a seed of its own; the first answer ends the others. This thread alone asks stop.
Fit Ladder::decide_together(Bytes capacity, std::int64_t max_nodes, const std::function<bool()>& stop, std::size_t& winner) {
  const auto num_threads = static_cast<std::size_t>(num_threads_);
  search(num_threads - 1);
  std::atomic<bool> over = false;
  std::vector<Fit> fits(num_threads, Fit::kUnknown);
  const auto work = [&](std::size_t thread) {
    const auto ended = [&] { return over.load(std::memory_order_relaxed) || (thread == 0 && stop()); };
    fits[thread] = searches_[thread]->decide(capacity, {max_nodes, ended});
    if (thread == 0 || fits[thread] != Fit::kUnknown) over = true;
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 1; t < num_threads; ++t) threads.emplace_back(work, t);
    work(0);
  }
  winner = static_cast<std::size_t>(std::ranges::find_if(fits, [](Fit fit) { return fit != Fit::kUnknown; }) - fits.begin());
  if (winner < num_threads) return fits[winner];
  winner = 0;
  return Fit::kUnknown;
}

}  // namespace olla
