#include "olla/layout/problem/fixed.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "olla/base/error.hpp"

namespace olla {
namespace {

void check_place(std::size_t id, const char* kind, Offset offset, Bytes size, Bytes alignment) {
  if (offset == kFree || (offset >= 0 && offset % alignment == 0 && offset <= kMaxBytes - size)) return;
  throw PlanError("buffer " + std::to_string(id) + " has " + kind + " offset " + std::to_string(offset) +
                      ", expected -1 or a multiple of the alignment, " + std::to_string(alignment) + ", up to 2^62 bytes",
                  kind, {static_cast<std::int64_t>(id)});
}

// Goes through the buffers in time, with the places kept so far and alive.
class Sweep {
 public:
  Sweep(std::span<const Buffer> buffers, std::span<const Bytes> sizes, std::vector<Offset>& places)
      : buffers_(buffers), sizes_(sizes), places_(places) {}

  void run() {
    std::vector<std::size_t> births;
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      if (places_[i] != kFree && sizes_[i] > 0 && buffers_[i].lower < buffers_[i].upper) births.push_back(i);
    }
    std::vector<std::size_t> deaths = births;
    std::ranges::stable_sort(births, {}, [&](std::size_t i) { return buffers_[i].lower; });
    std::ranges::stable_sort(deaths, {}, [&](std::size_t i) { return buffers_[i].upper; });
    auto dies = deaths.begin();
    for (const std::size_t i : births) {
      for (; buffers_[*dies].upper <= buffers_[i].lower; ++dies) remove(*dies);
      insert(i);
    }
  }

 private:
  bool is_fixed(std::size_t i) const { return buffers_[i].fixed != kFree; }

  void insert(std::size_t i) {
    const Offset end = places_[i] + sizes_[i];
    auto other = live_.lower_bound(places_[i]);
    if (other != live_.begin() && places_[std::prev(other)->second] + sizes_[std::prev(other)->second] > places_[i]) --other;
    while (other != live_.end() && other->first < end) {
      const std::size_t j = other->second;
      if (!is_fixed(i)) {
        places_[i] = kFree;
        return;
      }
      if (is_fixed(j)) throw_collision(std::min(i, j), std::max(i, j));
      places_[j] = kFree;
      other = live_.erase(other);
    }
    live_.emplace(places_[i], i);
  }

  void remove(std::size_t i) {
    if (places_[i] != kFree) live_.erase(places_[i]);
  }

  void throw_collision(std::size_t i, std::size_t j) const {
    const auto range = [&](std::size_t k) {
      return "buffer " + std::to_string(k) + " at [" + std::to_string(places_[k]) + ", " + std::to_string(places_[k] + sizes_[k]) +
             ")";
    };
    throw PlanError("fixed offsets collide: " + range(i) + " and " + range(j) + " are alive together", "fixed",
                    {static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)});
  }

  std::span<const Buffer> buffers_;
  std::span<const Bytes> sizes_;
  std::vector<Offset>& places_;
  std::map<Offset, std::size_t> live_;
};

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
  Sweep(buffers, sizes, places).run();
  return places;
}

void move_to_preferred(std::span<const Buffer> buffers, std::span<const Bytes> sizes, Bytes height,
                       const std::function<bool()>& stop, std::vector<Offset>& offsets) {
  std::vector<std::size_t> births;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (sizes[i] > 0 && buffers[i].lower < buffers[i].upper) births.push_back(i);
  }
  std::ranges::stable_sort(births, {}, [&](std::size_t i) { return buffers[i].lower; });
  for (const std::size_t i : births) {
    const Buffer& buffer = buffers[i];
    const Offset begin = buffer.preferred, end = begin + sizes[i];
    if (begin == kFree || begin == offsets[i] || buffer.fixed != kFree || end > height) continue;
    if (stop()) return;
    const bool is_free = std::ranges::none_of(births, [&](std::size_t j) {
      const bool together = buffers[j].lower < buffer.upper && buffer.lower < buffers[j].upper;
      return j != i && together && offsets[j] < end && begin < offsets[j] + sizes[j];
    });
    if (is_free) offsets[i] = begin;
  }
}

}  // namespace olla
