// The least height by a ladder of capacities, each decided by the exact search.
#pragma once

#include <memory>

#include "olla/layout/exact/exact.hpp"

namespace olla {

// Keeps its searches, and with them what they learned, from one call of lower() to the next.
class Ladder {
 public:
  // is_decision: whether the lowest capacity is the only question.
  Ladder(const Part& part, std::uint64_t seed, int num_threads, bool is_decision)
      : part_(part), seed_(seed), num_threads_(num_threads), is_decision_(is_decision), bound_(part.load) {}

  // Ends as well where the height is proved least. The calling thread alone asks stop. With one thread the same calls give the same
  // packings.
  void lower(Bytes enough, std::int64_t max_nodes, const StopAt& stop, Packing& best);

  Bytes bound() const { return bound_; }  // proved: no packing is lower

 private:
  Fit decide(Bytes capacity, std::int64_t max_nodes, const std::function<bool()>& stop, Packing& best);
  Fit decide_together(Bytes capacity, std::int64_t max_nodes, const std::function<bool()>& stop, std::size_t& winner);
  ExactSearch& search(std::size_t thread);

  const Part& part_;
  const std::uint64_t seed_;
  const int num_threads_;
  const bool is_decision_;
  Bytes bound_;
  std::int64_t rung_nodes_ = 4000;
  int shift_ = 0;  // of the next step: its share of what there is to gain
  std::int64_t num_nodes_ = 0;
  std::vector<std::unique_ptr<ExactSearch>> searches_;  // of a thread
};

}  // namespace olla
