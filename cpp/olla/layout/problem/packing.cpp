#include "olla/layout/problem/packing.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "olla/base/error.hpp"
#include "olla/base/lists.hpp"

namespace olla {

std::vector<Bytes> rounded_sizes(std::span<const Buffer> buffers, Bytes alignment) {
  if (alignment < 1) throw PlanError("alignment is " + std::to_string(alignment) + ", expected 1 or more", "alignment", {});
  std::vector<Bytes> sizes;
  sizes.reserve(buffers.size());
  Bytes sum = 0;
  for (const Buffer& buffer : buffers) {
    const auto id = static_cast<std::int64_t>(sizes.size());
    const std::string subject = "buffer " + std::to_string(id) + " has size " + std::to_string(buffer.size);
    if (buffer.size < 0) throw PlanError(subject + ", expected 0 or more", "sizes", {id});
    const Bytes padding = buffer.size % alignment == 0 ? 0 : alignment - buffer.size % alignment;
    if (buffer.size > kMaxBytes - sum || padding > kMaxBytes - sum - buffer.size) {
      throw PlanError(subject + ": sizes rounded up to multiples of " + std::to_string(alignment) +
                          " sum to more than 2^62 bytes from there on",
                      "sizes", {id});
    }
    sizes.push_back(buffer.size + padding);
    sum += sizes.back();
  }
  return sizes;
}

std::vector<std::int32_t> living_by_birth(std::span<const Buffer> buffers, std::span<const Bytes> sizes) {
  std::vector<std::int32_t> births = sorted_by(buffers.size(), [&](std::int32_t i) { return buffers[i].lower; });
  std::erase_if(births, [&](std::int32_t i) { return sizes[i] == 0 || buffers[i].lower >= buffers[i].upper; });
  return births;
}

std::vector<Part> reduce(std::span<const Buffer> buffers, std::span<const Bytes> sizes) {
  const std::vector<std::int32_t> births = living_by_birth(buffers, sizes);
  std::vector<std::int32_t> deaths = births;
  std::ranges::stable_sort(deaths, {}, [&](std::int32_t i) { return buffers[i].upper; });

  std::vector<Part> parts;
  std::vector<ItemId> item_of(buffers.size());
  std::size_t num_dead = 0;
  Bytes live = 0;
  bool died = true;  // since the last birth: the next birth begins a section
  const auto die = [&] {
    const std::int32_t i = deaths[num_dead++];
    parts.back().items[item_of[i]].last = parts.back().num_sections();
    live -= sizes[i];
    died = true;
  };
  for (std::size_t num_born = 0; num_born < births.size(); ++num_born) {
    const std::int32_t i = births[num_born];
    while (num_dead < num_born && buffers[deaths[num_dead]].upper <= buffers[i].lower) die();
    if (num_dead == num_born) parts.emplace_back();
    Part& part = parts.back();
    if (died) part.section_load.push_back(0);
    died = false;
    item_of[i] = part.num_items();
    part.buffers.push_back(i);
    part.items.push_back({part.num_sections() - 1, 0, sizes[i]});
    live += sizes[i];
    part.section_load.back() = live;
    part.load = std::max(part.load, live);
  }
  while (num_dead < deaths.size()) die();
  for (Part& part : parts) part.bound = part.load;
  return parts;
}

void fix_items(std::span<const Offset> places, Part& part) {
  for (ItemId i = 0; i < part.num_items(); ++i) {
    const Offset place = places[part.buffers[i]];
    if (place == kFree) continue;
    if (part.fixed.empty()) part.fixed.assign(part.items.size(), kUnplaced);
    part.fixed[i] = place;
    part.bound = std::max(part.bound, place + part.items[i].size);
  }
}

Bytes height_of(const Part& part, std::span<const Offset> offsets) {
  Bytes height = 0;
  for (ItemId i = 0; i < part.num_items(); ++i) height = std::max(height, offsets[i] + part.items[i].size);
  return height;
}

std::vector<ItemId> born_before(const Part& part) {
  std::vector<ItemId> count(part.num_sections() + 1, 0);
  for (const Item& item : part.items) ++count[item.first + 1];
  for (Section s = 0; s < part.num_sections(); ++s) count[s + 1] += count[s];
  return count;
}

namespace {

class Enumeration {
 public:
  Enumeration(const Part& part, Bytes enough) : part_(part), enough_(std::max(enough, part.load)) {
    best_.height = std::numeric_limits<Bytes>::max();
    offsets_.fill(kUnplaced);
    extend({}, {0, -1});
  }
  Packing take() { return std::move(best_); }

 private:
  using Tops = std::array<Bytes, kMaxEnumerated>;  // of the sections; there are at most as many as items

  // Tries every next item. last: offset of the item placed last, and the item: offsets never fall, and equal ones rise by item.
  void extend(const Tops& tops, std::pair<Offset, ItemId> last) {
    bool complete = true;
    for (ItemId i = 0; i < part_.num_items(); ++i) {
      if (offsets_[i] != kUnplaced) continue;
      complete = false;
      const Item& item = part_.items[i];
      const Offset offset = *std::max_element(tops.begin() + item.first, tops.begin() + item.last);
      if (std::pair(offset, i) < last) continue;
      Tops next = tops;
      std::fill(next.begin() + item.first, next.begin() + item.last, offset + item.size);
      offsets_[i] = offset;
      if (reach(next, offset) < best_.height) extend(next, {offset, i});
      offsets_[i] = kUnplaced;
      if (best_.height <= enough_) return;
    }
    if (!complete) return;
    best_.height = *std::ranges::max_element(tops);
    best_.offsets.assign(offsets_.begin(), offsets_.begin() + part_.num_items());
  }

  // A lower bound on the height, from the items still to come, none of them below floor.
  Bytes reach(const Tops& tops, Offset floor) const {
    Tops reached = tops;
    for (ItemId i = 0; i < part_.num_items(); ++i) {
      if (offsets_[i] != kUnplaced) continue;
      for (Section s = part_.items[i].first; s < part_.items[i].last; ++s) {
        reached[s] = std::max(reached[s], floor) + part_.items[i].size;
      }
    }
    return *std::ranges::max_element(reached);
  }

  const Part& part_;
  const Bytes enough_;
  std::array<Offset, kMaxEnumerated> offsets_{};
  Packing best_;
};

}  // namespace

Packing enumerate(const Part& part, Bytes enough) { return Enumeration(part, enough).take(); }

}  // namespace olla
