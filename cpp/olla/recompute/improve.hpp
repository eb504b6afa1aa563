// Better decisions than the greedy's: takes back what has become superfluous, and searches around what is left.
#pragma once

#include "olla/recompute/evict.hpp"

namespace olla {

// Starts from the decisions in force, which must meet the target's limit, and from seeds, which need not; ends with the best of all
// that was ever in force.
// Source: reverse deletion, then destroy and repair (Shaw, "Using constraint programming and local search methods to solve vehicle
// routing problems", 1998) with the greedy as repair. Deterministic unless time ends it.
void improve(Evictor& evictor, const Target& target, std::uint64_t seed, int max_rounds, Control& control,
             std::span<const std::vector<Decision>> seeds = {});

}  // namespace olla
