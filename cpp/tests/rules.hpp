// What may be done with the ops of a test's graph, and a graph that is worth doing it to.
#pragma once

#include "graphs.hpp"
#include "olla/graph/values.hpp"

namespace olla::test {

// Everything that draws no random numbers may be recomputed; seconds of op v: 1, 2, 3, 1, ..., or 1 each.
inline Rules rules_for(const GraphData& d, bool in_place = false, bool alike = false) {
  const std::size_t num_ops = d.workspace_bytes.size();
  Rules rules;
  for (std::size_t v = 0; v < num_ops; ++v) rules.seconds.push_back(alike ? 1.0 : 1.0 + static_cast<double>(v % 3));
  for (const auto random : d.random) rules.rerun.push_back(static_cast<std::uint8_t>(random != 0 ? Rerun::kNever : Rerun::kWhole));
  rules.rerun_seconds = rules.seconds;
  rules.in_place.assign(num_ops, in_place ? 1 : 0);
  rules.rerun_reads.offset.assign(num_ops + 1, 0);
  return rules;
}

// Forward ops 0 to n - 1 keep an activation each for the backward ops n to 2 n - 1, which read them in reverse.
inline GraphData training(OpId n) {
  std::vector<Bytes> bytes;
  std::vector<Op> ops;
  for (OpId v = 0; v < n; ++v) {
    bytes.push_back(10);
    Op op{.writes = {v}};
    if (v > 0) op.reads = {v - 1};
    ops.push_back(op);
  }
  for (OpId v = n - 1; v >= 0; --v) {
    bytes.push_back(1);
    Op op{.reads = {v}, .writes = {static_cast<TensorId>(bytes.size()) - 1}};
    if (v < n - 1) op.reads.push_back(static_cast<TensorId>(bytes.size()) - 2);
    ops.push_back(op);
  }
  return data(std::move(bytes), ops);
}

}  // namespace olla::test
