#include "olla/layout/pipelines/peaks.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

namespace olla {
namespace {

constexpr std::array<Bytes, 4> kFreeShares{400, 200, 100, 50};  // a section is crowded where less than one in so many is free
constexpr std::size_t kMinShared = 4;                           // crowded sections that the items of a block live through
constexpr Bytes kMaxExcess = 100;  // the load of the blocks may be above that of the items by one in so many
constexpr std::int64_t kNodesPerTry = 4000, kItemsPerNode = 10;
constexpr int kUnpackings = 4;

template <class Visit>
void each_section(const Part& part, ItemId i, const Visit& visit) {
  for (Section s = part.items[i].first; s < part.items[i].last; ++s) visit(s);
  if (part.again.empty()) return;
  for (const Stretch& life : part.again[i]) {
    for (Section s = life.first; s < life.last; ++s) visit(s);
  }
}

}  // namespace

Peaks::Peaks(const Part& part, const LadderOptions& options) : part_(part), random_(options.seed) {
  for (const Bytes free : kFreeShares) {
    auto crowd = std::make_unique<Crowd>(crowded(part, part.load - part.load / free));
    const bool is_known = !crowds_.empty() && crowd->part.num_items() == crowds_.back()->part.num_items();
    const bool is_small = 3 * crowd->part.num_items() <= 2 * part.num_items();
    if (is_known || !is_small || crowd->part.load > part.load + part.load / kMaxExcess) continue;
    crowd->ladder = std::make_unique<Ladder>(crowd->part, options);
    crowd->packing.height = std::numeric_limits<Bytes>::max();
    crowds_.push_back(std::move(crowd));
  }
}

Peaks::Crowd Peaks::crowded(const Part& part, Bytes least) {
  using Block = std::int32_t;
  Crowd crowd;
  std::map<std::vector<Section>, Block> block_of;  // of the crowded sections its items live through
  std::vector<std::vector<ItemId>> members;
  std::vector<std::vector<Block>> alive(part.num_sections());
  for (ItemId i = 0; i < part.num_items(); ++i) {
    std::vector<Section> life;
    each_section(part, i, [&](Section s) {
      if (part.section_load[s] >= least) life.push_back(s);
    });
    if (life.empty()) continue;
    auto block = static_cast<Block>(members.size());
    if (life.size() >= kMinShared) block = block_of.try_emplace(std::move(life), block).first->second;
    if (block == std::ssize(members)) members.emplace_back();
    members[block].push_back(i);
    each_section(part, i, [&](Section s) { alive[s].push_back(block); });
  }
  // A block lives where one of its items does. Sections where the same ones live are one.
  std::map<std::vector<Block>, Section> known;
  std::vector<std::vector<Stretch>> lives(members.size());
  for (std::vector<Block>& here : alive) {
    std::ranges::sort(here);
    here.erase(std::ranges::unique(here).begin(), here.end());
    const Section section = crowd.part.num_sections();
    if (here.empty() || !known.try_emplace(here, section).second) continue;
    crowd.part.section_load.push_back(0);
    for (const Block block : here) {
      if (lives[block].empty() || lives[block].back().last < section) lives[block].push_back({section, section});
      ++lives[block].back().last;
    }
  }
  std::vector<Block> order(members.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](Block block) { return lives[block][0].first; });
  for (const Block block : order) {
    Bytes size = 0;
    for (const ItemId i : members[block]) size += part.items[i].size;
    for (const Stretch& life : lives[block]) {
      for (Section s = life.first; s < life.last; ++s) crowd.part.section_load[s] += size;
    }
    crowd.part.items.push_back({lives[block][0].first, lives[block][0].last, size});
    crowd.part.again.emplace_back(lives[block].begin() + 1, lives[block].end());
    crowd.members.push_back(std::move(members[block]));
  }
  crowd.part.load = crowd.part.bound = std::ranges::max(crowd.part.section_load);
  return crowd;
}

void Peaks::lower(Bytes enough, std::int64_t max_nodes, const std::function<bool(Bytes)>& stop, Packing& best) {
  bool stopped = crowds_.empty();
  const auto asked = [&](Bytes) { return stopped = stopped || stop(best.height); };
  for (std::int64_t nodes = max_nodes; best.height > enough && nodes > 0 && !asked(best.height); nodes -= kNodesPerTry) {
    Crowd& crowd = *crowds_[next_++ % crowds_.size()];
    crowd.packing.height = std::min(crowd.packing.height, best.height);
    crowd.ladder->lower(enough, kNodesPerTry, asked, crowd.packing);
    for (int k = 0; k < kUnpackings && crowd.packing.height < best.height && !asked(best.height); ++k) {
      const Bytes target = crowd.packing.height + (k % 2 == 0 ? 0 : (best.height - crowd.packing.height) / 2);
      ExactSearch exact(part_, unpack(crowd), {}, random_());
      const Fit fit = exact.decide(target, {kNodesPerTry, [&] { return asked(best.height); }});
      nodes -= exact.num_nodes() + part_.num_items() / kItemsPerNode;
      if (fit != Fit::kFits) continue;
      best.offsets = exact.offsets();
      best.height = height_of(part_, best.offsets);
    }
  }
}

// The items of a block lie in it by birth, or the other way round.
std::vector<Offset> Peaks::unpack(const Crowd& crowd) {
  std::vector<Offset> offsets(part_.items.size(), kUnplaced);
  for (std::size_t block = 0; block < crowd.members.size(); ++block) {
    std::vector<ItemId> members = crowd.members[block];
    if (members.size() == 1) continue;
    if (random_() % 2 == 0) std::ranges::reverse(members);
    Offset offset = crowd.packing.offsets[block];
    for (const ItemId i : members) {
      offsets[i] = offset;
      offset += part_.items[i].size;
    }
  }
  return offsets;
}

}  // namespace olla
