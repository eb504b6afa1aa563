// Parts that repeat themselves, as pipelines of microbatches do: a short one is packed, and what repeats is laid end to end.
#pragma once

#include "olla/layout/pipelines/repetition.hpp"

namespace olla {

// What is alive at the begin of a stretch (of one repetition's length), and born in what repeats, is gone at its end. The short
// part lacks all but kKept of the stretches; but for that it is the same.
class Fold {
 public:
  static constexpr Section kKept = 2;

  static std::optional<Fold> find(const Part& part, const Repetition& repeats);  // none where it would not be half as large

  const Part& short_part() const { return short_; }

  // Where a packing of the short part can be cut: fewest items alive first.
  std::vector<Section> cuts() const;

  // One stretch from the cut on. What is alive at its begin is fixed where it lies in the packing of the short part, and what is
  // alive at its end where its like lay at the begin; the others are free.
  Part stretch(Section cut, const Packing& packing) const;

  // The whole part: the packing of the short one up to the cut, stretches, and the rest of the packing.
  Packing unfold(Section cut, const Packing& packing, const Part& stretch, const Packing& repeated) const;

 private:
  Fold(const Part& part, const Repetition& repeats) : part_(&part), repeats_(&repeats) {}
  bool find_stretches();
  bool shorten();

  const Part* part_;
  const Repetition* repeats_;
  Section from_ = 0, length_ = 0;  // the first stretch, the length of each
  Section removed_ = 0;            // sections that the short part lacks
  Part short_;  // its item k is repeats_->sorted[k], or, after what was removed, repeats_->sorted[k + removed items]
  std::vector<ItemId> short_born_before_;
};

}  // namespace olla
