// The crowded sections first: what is alive there is packed in blocks, then everything else around it.
#pragma once

#include <random>

#include "olla/layout/exact/ladder.hpp"

namespace olla {

// Items alive where little is free are taken first; those that live through the same crowded sections become one block, alive where
// one of them is. So few are left that the exact search packs them soon. Then it places all other items around the blocks. What is
// crowded is tried in several ways. A restriction of the problem: it finds packings, and proves nothing.
class Peaks {
 public:
  Peaks(const Part& part, const LadderOptions& options);

  // Lowers the packing until its height is at most enough, or the nodes are used up, or stop says so, asked with the present
  // height. The next call goes on from here.
  void lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best);

 private:
  struct Crowd {
    Part part;                                 // its items are the blocks
    std::vector<std::vector<ItemId>> members;  // of a block, by birth
    std::unique_ptr<Ladder> ladder;
    Packing packing;  // of the blocks
  };

  static Crowd crowded(const Part& part, Bytes least);
  std::vector<Offset> unpack(const Crowd& crowd);

  const Part& part_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Crowd>> crowds_;  // fewest sections first
  std::size_t next_ = 0;                        // of these
};

}  // namespace olla
