// The dataflow graph of one training step: who reads, writes and mutates which storage, and the dependencies that follow.
#pragma once

#include <optional>
#include <string>

#include "olla/base/error.hpp"
#include "olla/base/types.hpp"

namespace olla {

// What a caller supplies. Ops stand in program order. Index i of every per-op (per-tensor) list is op (tensor) i.
struct GraphData {
  std::vector<Bytes> tensor_bytes;
  std::vector<std::uint8_t> donated;  // resident, but the step may free it after its last use
  Csr<TensorId> reads, writes, mutates;
  Csr<OpId> after;  // extra predecessors of each op
  std::vector<Bytes> workspace_bytes;
  std::vector<std::uint8_t> random;  // draws from a generator: keeps its program order among the random ops
  std::vector<TensorId> outputs;     // live to the end of the step
};

// Immutable after construction. Complexity: O(ops + tensors + reads + writes + mutates + after), plus sorting of each list.
class Graph {
 public:
  // Throws GraphError. Its rule, and what its ids are: "lengths" (none), "ids" (op where there is one, unknown id), "sizes" (tensor
  // or op), "two_writers" (tensor, op, op), "writes_donated" (tensor, op), "cycle" (ops), "program_order" (op that must run first,
  // op).
  explicit Graph(GraphData data);

  // The same graph with more precedences, which need not agree with the program order. Throws GraphError "cycle" or "ids".
  Graph constrained(std::span<const Edge> extra) const;
  std::optional<Graph> constrained_if_acyclic(std::span<const Edge> extra) const;

  OpId num_ops() const { return static_cast<OpId>(data_.workspace_bytes.size()); }
  TensorId num_tensors() const { return static_cast<TensorId>(data_.tensor_bytes.size()); }

  Bytes bytes(TensorId t) const { return data_.tensor_bytes[t]; }
  Bytes workspace(OpId v) const { return data_.workspace_bytes[v]; }
  OpId producer(TensorId t) const { return producer_[t]; }  // kNoOp if resident
  bool donated(TensorId t) const { return data_.donated[t] != 0; }
  bool output(TensorId t) const { return output_[t] != 0; }
  // A planned tensor has a lifetime of its own: written by an op, or donated. All others are live throughout.
  bool planned(TensorId t) const { return producer_[t] != kNoOp || donated(t); }

  std::span<const TensorId> writes(OpId v) const { return writes_[v]; }  // sorted, unique
  std::span<const TensorId> uses(OpId v) const { return uses_[v]; }      // read or mutated, not written; sorted, unique
  std::span<const OpId> users(TensorId t) const { return users_[t]; }    // ops that use it, sorted, without its producer
  std::span<const OpId> preds(OpId v) const { return preds_[v]; }        // direct dependencies, sorted, unique
  std::span<const OpId> succs(OpId v) const { return succs_[v]; }
  const Csr<OpId>& preds() const { return preds_; }

  Bytes new_bytes(OpId v) const { return new_bytes_[v]; }   // what v allocates for the tensors it writes
  Bytes resident_bytes() const { return resident_bytes_; }  // live throughout: neither written nor donated

  const GraphData& data() const { return data_; }
  bool is_order(std::span<const OpId> order) const;  // a permutation of the ops that respects every dependency

 private:
  Graph with_edges(std::span<const Edge> extra) const;
  void derive_tensors();
  void derive_dependencies();
  void set_edges(std::vector<Edge> edges);
  std::vector<std::int64_t> find_cycle() const;  // empty if there is none
  void reject_cycle() const;

  GraphData data_;
  std::vector<OpId> producer_;
  std::vector<std::uint8_t> output_;
  Csr<TensorId> writes_, uses_;
  Csr<OpId> users_, preds_, succs_;
  std::vector<Bytes> new_bytes_;
  Bytes resident_bytes_ = 0;
};

}  // namespace olla
