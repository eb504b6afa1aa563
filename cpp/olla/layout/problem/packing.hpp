// The layout problem after reduction (independent parts, times merged into sections), and the exact solution of a tiny part.
#pragma once

#include <functional>

#include "olla/layout/problem/buffer.hpp"

namespace olla {

using Section = std::int32_t;  // position among the times at which a maximal set of buffers is alive
using ItemId = std::int32_t;   // position in a part

inline constexpr Offset kUnplaced = -1;

struct Item {
  Section first, last;  // alive in the sections [first, last), never empty
  Bytes size;           // > 0
};

struct Part {
  std::vector<std::int32_t> buffers;  // buffer of item i
  std::vector<Item> items;            // first never falls
  std::vector<Bytes> section_load;
  Bytes load = 0;             // max(section_load)
  Bytes bound = 0;            // no packing is lower: the load, or the end of a fixed item
  std::vector<Offset> fixed;  // of item i: where it must lie, or kUnplaced; empty where no item is fixed

  Section num_sections() const { return static_cast<Section>(section_load.size()); }
  ItemId num_items() const { return static_cast<ItemId>(items.size()); }
  bool is_fixed(ItemId i) const { return !fixed.empty() && fixed[i] != kUnplaced; }
};

struct Packing {
  std::vector<Offset> offsets;  // of item i
  Bytes height = 0;
};

// Searches that lower a packing ask this with the present height. They end when the height is at most enough, the nodes are used
// up or this is true; the next call goes on from there.
using StopAt = std::function<bool(Bytes)>;

// Sizes rounded up to the alignment. PlanError as layout() says.
std::vector<Bytes> rounded_sizes(std::span<const Buffer> buffers, Bytes alignment);

// The buffers that are ever alive, the first born first.
std::vector<std::int32_t> living_by_birth(std::span<const Buffer> buffers, std::span<const Bytes> sizes);

// Splits at times no buffer crosses, and merges times between which no buffer is born after another died: buffers overlap in
// sections exactly where they overlap in time. Buffers that are never alive are in no part. O(n log n).
std::vector<Part> reduce(std::span<const Buffer> buffers, std::span<const Bytes> sizes);

// Fixes items: places[i] is where buffer i must lie, or kFree.
void fix_items(std::span<const Offset> places, Part& part);

// The highest end of an item, each placed at its offset.
Bytes height_of(const Part& part, std::span<const Offset> offsets);

// Of every section: how many items are born before it. Items stand by birth, so those born in time to meet item i are a prefix.
std::vector<ItemId> born_before(const Part& part);

// Least height of a part of up to kMaxEnumerated items, or the first height found at or below enough.
// Some optimal packing has every item resting on another or on the floor: placed by rising offset, each item lies on top of all
// those placed before it that it overlaps. All such orders are tried, but for those the load still to come rules out.
inline constexpr ItemId kMaxEnumerated = 8;
Packing enumerate(const Part& part, Bytes enough);

}  // namespace olla
