#include "olla/layout/pipelines/long_lived.hpp"

#include <algorithm>

namespace olla {
namespace {

constexpr std::int64_t kMaxWork = 100'000'000;

}  // namespace

LongLivedBase find_base(const Part& part) {
  LongLivedBase base;
  base.offsets.assign(part.items.size(), kUnplaced);
  std::vector<ItemId> longest;
  for (ItemId i = 0; i < part.num_items(); ++i) {
    if (part.items[i].last - part.items[i].first > part.num_sections() / 2) longest.push_back(i);
  }
  if (std::ssize(longest) * part.num_sections() > kMaxWork) return base;
  std::ranges::stable_sort(longest, {}, [&](ItemId i) { return part.items[i].first - part.items[i].last; });
  std::vector<Bytes> load = part.section_load;
  for (const ItemId i : longest) {
    const Item& item = part.items[i];
    const auto fits = [&](Bytes other) { return other + item.size <= part.load; };
    const auto first = load.begin() + item.first, last = load.begin() + item.last;
    if (!std::all_of(load.begin(), first, fits) || !std::all_of(last, load.end(), fits)) continue;
    std::for_each(load.begin(), first, [&](Bytes& other) { other += item.size; });
    std::for_each(last, load.end(), [&](Bytes& other) { other += item.size; });
    base.offsets[i] = base.height;
    base.height += item.size;
  }
  return base;
}

}  // namespace olla
