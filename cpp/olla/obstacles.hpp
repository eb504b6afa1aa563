// The fixed items of a part, as what the skyline has to build around.
#pragma once

#include "olla/item_pool.hpp"

namespace olla {

class Obstacles {
 public:
  explicit Obstacles(const Part& part);

  struct Obstacle {
    Offset offset = std::numeric_limits<Offset>::max();
    Item item{0, 0, 0};  // size 0: there is none
    std::int32_t rank = kNoRank;
  };

  // The lowest at or above an offset among those alive anywhere in [first, last). As fast as the pool.
  Obstacle next(Section first, Section last, Offset from) const;
  Obstacle after(Section first, Section last, std::int32_t rank) const;  // the lowest of greater rank
  bool empty() const { return offsets_.empty(); }

 private:
  static Part fixed_part(const Part& part);

  const Part part_;                    // the fixed items alone
  const std::vector<Offset> offsets_;  // theirs, rising
  ItemPool pool_;                      // by that rank
};

}  // namespace olla
