// A set of ids that is emptied at no cost: what a loop has seen already, without a search through a list.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace olla {

class Marks {
 public:
  explicit Marks(std::int32_t num_ids = 0) : round_of_(static_cast<std::size_t>(num_ids), 0) {}

  void clear() { ++round_; }
  bool has(std::int32_t id) const { return round_of_[static_cast<std::size_t>(id)] == round_; }
  bool add(std::int32_t id) {
    return std::exchange(round_of_[static_cast<std::size_t>(id)], round_) != round_;
  }  // whether it is new
  void remove(std::int32_t id) { round_of_[static_cast<std::size_t>(id)] = 0; }

 private:
  std::vector<std::int64_t> round_of_;  // of id i: the round that added it last
  std::int64_t round_ = 1;
};

}  // namespace olla
