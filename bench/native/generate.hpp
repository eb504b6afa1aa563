// Training steps of any size: forward, backward with the saved activations in reverse, one in-place update after another at the
// end. The compact twin of tests/support/generate.py, for binaries without Python. And tangles, on which the search has to branch.
#pragma once

#include "olla/graph/graph.hpp"

namespace olla::bench {

enum class Family : std::uint8_t {
  kConvnet,      // residual and inception blocks; peaks amid the backward pass
  kTransformer,  // peaks at the loss, where one cut proves that no order helps
  kTangle,       // random reads among the latest tensors, random sizes: no training step, but hard
  kTables,       // embedding tables of unequal sizes, all looked up, joined, and updated: very many parallel branches, both ways
  kTree          // chains joined in pairs, random sizes: no training step either
};

struct StackOptions {
  Family family = Family::kConvnet;
  std::int64_t num_ops = 60'000;  // the number of layers follows: the result is off by less than half a layer
  bool clip = false;  // gradients clipped to a global norm: no update can run before the last one; not for tangles and trees
};

struct TrainingStep {
  GraphData data;
  OpId first_update = 0;  // ops from here on update parameters
};

TrainingStep stack(const StackOptions& options);

// The program order with every update right after the last gradient it needs.
std::vector<OpId> hoisted_order(const Graph& graph, OpId first_update);

}  // namespace olla::bench
