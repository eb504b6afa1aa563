#include "olla/layout/problem/fixed.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "olla/base/error.hpp"
#include "olla/layout/problem/packing.hpp"

namespace olla {
namespace {

void check_place(std::size_t id, const char* kind, Offset offset, Bytes size, Bytes alignment) {
  if (offset == kFree || (offset >= 0 && offset % alignment == 0 && offset <= kMaxBytes - size)) return;
  throw PlanError("buffer " + std::to_string(id) + " has " + kind + " offset " + std::to_string(offset) +
                      ", expected -1 or a multiple of the alignment, " + std::to_string(alignment) + ", up to 2^62 bytes",
                  kind, {static_cast<std::int64_t>(id)});
}

// Goes through the buffers in time, with the places kept so far and alive.
void drop_collisions(std::span<const Buffer> buffers, std::span<const Bytes> sizes, std::vector<Offset>& places) {
  const auto collide = [&](std::int32_t i, std::int32_t j) {
    const auto range = [&](std::int32_t k) {
      return "buffer " + std::to_string(k) + " at [" + std::to_string(places[k]) + ", " + std::to_string(places[k] + sizes[k]) +
             ")";
    };
    throw PlanError("fixed offsets collide: " + range(i) + " and " + range(j) + " are alive together", "fixed", {i, j});
  };
  std::map<Offset, std::int32_t> live;
  const auto insert = [&](std::int32_t i) {
    const Offset end = places[i] + sizes[i];
    auto other = live.lower_bound(places[i]);
    if (other != live.begin() && places[std::prev(other)->second] + sizes[std::prev(other)->second] > places[i]) --other;
    while (other != live.end() && other->first < end) {
      const std::int32_t j = other->second;
      const bool is_fixed = buffers[i].fixed != kFree;
      if (is_fixed && buffers[j].fixed != kFree) collide(std::min(i, j), std::max(i, j));
      places[is_fixed ? j : i] = kFree;
      if (!is_fixed) return;
      other = live.erase(other);
    }
    live.emplace(places[i], i);
  };
  std::vector<std::int32_t> births = living_by_birth(buffers, sizes);
  std::erase_if(births, [&](std::int32_t i) { return places[i] == kFree; });
  std::vector<std::int32_t> deaths = births;
  std::ranges::stable_sort(deaths, {}, [&](std::int32_t i) { return buffers[i].upper; });
  auto dies = deaths.begin();
  for (const std::int32_t i : births) {
    for (; buffers[*dies].upper <= buffers[i].lower; ++dies) {
      if (places[*dies] != kFree) live.erase(places[*dies]);
    }
    insert(i);
  }
}

}  // namespace

std::vector<Offset> given_places(std::span<const Buffer> buffers, std::span<const Bytes> sizes, Bytes alignment, Bytes height) {
  std::vector<Offset> places(buffers.size(), kFree);
  bool any = false;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = buffers[i];
    check_place(i, "fixed", buffer.fixed, sizes[i], alignment);
    check_place(i, "preferred", buffer.preferred, sizes[i], alignment);
    if (buffer.fixed != kFree) {
      places[i] = buffer.fixed;
    } else if (buffer.preferred != kFree && buffer.preferred + sizes[i] <= height) {
      places[i] = buffer.preferred;
    }
    any = any || places[i] != kFree;
  }
  if (!any) return {};
  drop_collisions(buffers, sizes, places);
  return places;
}

void move_to_preferred(std::span<const Buffer> buffers, std::span<const Bytes> sizes, Bytes height,
                       const std::function<bool()>& stop, std::vector<Offset>& offsets) {
  const std::vector<std::int32_t> births = living_by_birth(buffers, sizes);
  for (const std::int32_t i : births) {
    const Buffer& buffer = buffers[i];
    const Offset begin = buffer.preferred, end = begin + sizes[i];
    if (begin == kFree || begin == offsets[i] || buffer.fixed != kFree || end > height) continue;
    if (stop()) return;
    const bool is_free = std::ranges::none_of(births, [&](std::int32_t j) {
      const bool together = buffers[j].lower < buffer.upper && buffer.lower < buffers[j].upper;
      return j != i && together && offsets[j] < end && begin < offsets[j] + sizes[j];
    });
    if (is_free) offsets[i] = begin;
  }
}

}  // namespace olla
