// Which blocks to copy to host memory: for a limit in bytes and a stalling time, chosen greedily where most is live, with the
// copies' timeline run again after every step.
#pragma once

#include <random>

#include "olla/base/control.hpp"
#include "olla/graph/graph.hpp"
#include "olla/swap/timeline.hpp"

namespace olla {

// A tensor between two uses with at least one op between them; or, with next <= last, one that lasts beyond the step, from its last
// use to its first in the step after, which is just like this one.
struct IdleBlock {
  TensorId tensor;
  Bytes bytes;
  Step made;  // the last op that changed it
  Step last, next;
  bool wraps() const { return next <= last; }
  bool idle(Step s) const { return wraps() ? s < next || last < s : last < s && s < next; }
};

// Tensors that an op writes, of at least min_bytes, in every gap between two uses; and those of `lasting`, from step to step.
// O(ops + uses).
std::vector<IdleBlock> idle_blocks(const Graph& graph, std::span<const OpId> order, Bytes min_bytes,
                                   std::span<const TensorId> lasting = {});

struct SwapChoice {
  std::vector<std::int32_t> block;  // of swap i, in the order of the copies out; a block that wraps has two
  std::vector<Swap> swaps;
  Timeline timeline;
  double excess = 0;  // bytes above the limit, summed over the steps
};

// Deterministic unless time ends it; a unit of work is a step of a timeline that is tried.
class SwapSearch {
 public:
  // Memory and time of the steps, without swaps. Index b of blocks is the id of a block; host_bytes: most in host memory at once.
  SwapSearch(std::vector<Bytes> live, std::vector<double> seconds, std::vector<IdleBlock> blocks, const Link& link,
             Bytes host_bytes);
  SwapSearch(const SwapSearch&) = delete;

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()); }

  // How blocks (indices) run beside the ops; those whose copies do not fit into their gap are left out. With stalls, ops wait where
  // more than the limit, in bytes, is live. O(steps + blocks log blocks) for every round of leaving out.
  SwapChoice evaluate(std::span<const std::int32_t> blocks, Bytes limit, bool stalls, bool by_last) const;

  // Blocks with which the peak is at most the limit and ops wait at most most_stall_seconds, or the best choice that was found.
  SwapChoice fit(Bytes limit, double most_stall_seconds, Control& control);

  // The least peak that was found with that stall, from the given choices of blocks and fresh ones: bisection on the limit, then
  // num_rounds choices with blocks left out at random.
  SwapChoice least_peak(double most_stall_seconds, std::span<const std::vector<std::int32_t>> starts, std::uint64_t seed,
                        int num_rounds, Control& control);

 private:
  enum class Score : std::uint8_t { kEarly, kLarge, kArea, kExcess };
  struct Rule {
    Score score;
    bool by_last;   // the order of the copies out: by the last use before, else by when the value is made
    bool per_byte;  // compare what is gained per byte copied
  };
  SwapChoice trial(std::span<const std::int32_t> blocks, Bytes limit, bool stalls, bool by_last, Control& control) const;
  SwapChoice grow(std::vector<std::int32_t> blocks, Bytes limit, double most_stall_seconds, const Rule& rule, Control& control);
  void shrink(SwapChoice& choice, Bytes limit, double most_stall_seconds, bool by_last, Control& control) const;
  void add_swaps(std::span<const std::int32_t> blocks, SwapChoice& choice) const;
  double score(const IdleBlock& block, Score score, const Timeline& timeline, Bytes limit) const;
  bool allowed(const SwapChoice& choice, double most_stall_seconds) const;

  const std::vector<Bytes> live_;
  const std::vector<double> seconds_;
  const Steps steps_;
  const std::vector<IdleBlock> blocks_;
  const Link link_;
  const Bytes host_bytes_;
  std::vector<double> begin_;  // of step s, without swaps
  std::mt19937_64 random_;
  double noise_ = 0;
};

}  // namespace olla
