#include "olla/order/segments.hpp"

#include <algorithm>

namespace olla {
namespace {

Segment glued(const Segment& a, const Segment& b, std::vector<OpId>& next) {
  Segment both{std::max(a.hill, a.rise + b.hill), a.rise + b.rise, a.first, b.last};
  if (a.first == kNoOp) both.first = b.first;
  if (b.first == kNoOp) both.last = a.last;
  if (a.first != kNoOp && b.first != kNoOp) next[a.last] = b.first;
  return both;
}

}  // namespace

std::vector<Segment> canonical(std::span<const Segment> segments, std::vector<OpId>& next) {
  const JohnsonOrder before;
  std::vector<Segment> list;
  for (Segment segment : segments) {
    for (; !list.empty() && !before(list.back(), segment); list.pop_back()) segment = glued(list.back(), segment, next);
    list.push_back(segment);
  }
  return list;
}

void SegmentList::join_parallel(SegmentList& other) {
  if (segments_.size() < other.segments_.size()) segments_.swap(other.segments_);
  segments_.merge(other.segments_);
}

void SegmentList::join_series(SegmentList& other, std::vector<OpId>& next) {
  const JohnsonOrder before;
  auto &front = segments_, &back = other.segments_;
  if (!before(*front.rbegin(), *back.begin())) {
    Segment middle = glued(*front.rbegin(), *back.begin(), next);
    front.erase(std::prev(front.end()));
    back.erase(back.begin());
    for (;;) {
      if (!front.empty() && !before(*front.rbegin(), middle)) {
        middle = glued(*front.rbegin(), middle, next);
        front.erase(std::prev(front.end()));
      } else if (!back.empty() && !before(middle, *back.begin())) {
        middle = glued(middle, *back.begin(), next);
        back.erase(back.begin());
      } else {
        break;
      }
    }
    front.insert(front.end(), middle);
  }
  join_parallel(other);
}

}  // namespace olla
