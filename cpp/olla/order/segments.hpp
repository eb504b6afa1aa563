// Hills and valleys: the pieces of the best order of a part of a graph, and how two parts are joined.
//
// A segment is a run of ops that stays together: while it runs memory rises by `hill` at most, and by `rise` in all. Two segments
// of two parts that do not depend on each other go in the order of Johnson's rule: first those that free, the lowest hill first;
// then those that take, the one that falls most behind its hill first. A list is canonical if its segments stand in that order,
// each strictly before the next. A segment that the rule puts before one it must follow is merged with it. So the best order of
// two parallel parts is their canonical lists merged, that of two parts in series one list behind the other, made canonical
// again. Sources: Abdel-Wahab, Kameda, Operations Research 26 (1978); Monma, Sidney, Mathematics of Operations Research 4 (1979);
// for trees Liu, SIAM J. Algebraic Discrete Methods 8 (1987).
#pragma once

#include <set>
#include <span>

#include "olla/base/types.hpp"

namespace olla {

struct Segment {
  Bytes hill = 0, rise = 0;          // above what was live before it; hill >= rise, hill >= 0
  OpId first = kNoOp, last = kNoOp;  // none, where it stands for ops that are listed elsewhere
};

struct JohnsonOrder {
  bool operator()(const Segment& a, const Segment& b) const {
    const bool takes = a.rise >= 0;
    if (takes != (b.rise >= 0)) return !takes;
    return takes ? a.hill - a.rise > b.hill - b.rise : a.hill < b.hill;
  }
};

// The canonical list of segments that run in the given order. As SegmentList::join_series.
std::vector<Segment> canonical(std::span<const Segment> segments, std::vector<OpId>& next);

class SegmentList {
 public:
  explicit SegmentList(const Segment& only) : segments_{only} {}
  explicit SegmentList(std::span<const Segment> canonical) : segments_(canonical.begin(), canonical.end()) {}

  // Merges a list that runs in parallel. O(n log m), n segments in the shorter list. `other` is left empty.
  void join_parallel(SegmentList& other);

  // Appends a list that runs after this one. Where two segments become one, next[v] becomes the op behind v. As join_parallel.
  void join_series(SegmentList& other, std::vector<OpId>& next);

  const std::multiset<Segment, JohnsonOrder>& segments() const { return segments_; }

 private:
  std::multiset<Segment, JohnsonOrder> segments_;
};

}  // namespace olla
