#include "olla/layout/layout.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <queue>
#include <string>

#include "olla/base/error.hpp"
#include "olla/layout/portfolio.hpp"
#include "olla/layout/problem/fixed.hpp"

namespace olla {
namespace {

constexpr double kGraceSeconds = 5;  // at least for the first passes: items they leave are stacked, a poor layout

// Divides all sizes and places by their greatest common divisor, so that buffers twice as large get the same layout, scaled.
Bytes divide_out(std::vector<Bytes>& sizes, std::vector<Offset>& places) {
  Bytes unit = 0;
  for (const Bytes size : sizes) unit = std::gcd(unit, size);
  for (const Offset place : places) unit = place == kFree ? unit : std::gcd(unit, place);
  if (unit == 0) return 1;
  for (Bytes& size : sizes) size /= unit;
  for (Offset& place : places) place = place == kFree ? kFree : place / unit;
  return unit;
}

// All parts: each gets a first packing, then the highest one is lowered turn by turn, as it alone determines the height.
class Parts {
 public:
  Parts(const std::vector<Part>& parts, const LayoutOptions& options, Bytes unit, Control& control)
      : unit_(unit), capacity_(options.capacity / unit), effort_{options.max_placements, options.max_nodes}, control_(control) {
    searches_.reserve(parts.size());
    for (const Part& part : parts) {
      searches_.push_back(std::make_unique<Portfolio>(part, options));
      load_ = std::max(load_, part.load);
      bound_ = std::max(bound_, part.bound);
    }
  }

  void lower() {
    for (const auto& search : searches_) {
      search->begin([&] { return over(height_) && (control_.cancelled() || control_.seconds() >= kGraceSeconds); });
      height_ = std::max(height_, search->best().height);
    }
    const auto by_height = [&](std::size_t a, std::size_t b) { return height_of(a) < height_of(b); };
    std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(by_height)> queue(by_height);
    for (std::size_t k = 0; k < searches_.size(); ++k) queue.push(k);
    for (bool goes_on = true; goes_on && !queue.empty();) {
      const std::size_t highest = queue.top();
      queue.pop();
      const Bytes rest = queue.empty() ? 0 : height_of(queue.top());
      Portfolio& search = *searches_[highest];
      const auto stop = [&](Bytes height) { return over(std::max(rest, height)); };
      goes_on = height_of(highest) > std::max(bound_, capacity_) && !stop(height_of(highest));
      // Once the highest part cannot be lowered, lowering others gains nothing.
      if (goes_on) goes_on = search.improve(std::max(bound_, capacity_), effort_, stop) || height_of(highest) < rest;
      bound_ = std::max(bound_, search.bound());
      height_ = std::max(rest, height_of(highest));
      queue.push(highest);
    }
  }

  const std::vector<Offset>& offsets(std::size_t k) const { return searches_[k]->best().offsets; }
  Bytes height() const { return height_; }
  Bytes load() const { return load_; }
  Bytes bound() const { return bound_; }

 private:
  Bytes height_of(std::size_t k) const { return searches_[k]->best().height; }
  bool over(Bytes height) { return control_.stop(unit_ * height, unit_ * bound_); }

  const Bytes unit_, capacity_;
  Bytes load_ = 0, bound_ = 0, height_ = 0;
  Effort effort_;
  Control& control_;
  std::vector<std::unique_ptr<Portfolio>> searches_;
};

// Lays out buffers of rounded sizes; places[i] is where buffer i must lie, or kFree, and there are none where all are free.
LayoutResult place(std::span<const Buffer> buffers, std::vector<Bytes> sizes, std::vector<Offset> places,
                   const LayoutOptions& options, Control& control) {
  LayoutResult result;
  result.offsets = places.empty() ? std::vector<Offset>(buffers.size(), 0) : places;
  std::ranges::replace(result.offsets, kFree, 0);
  const Bytes unit = divide_out(sizes, places);
  std::vector<Part> parts = reduce(buffers, sizes);
  if (!places.empty()) {
    for (Part& part : parts) fix_items(places, part);
  }
  Parts searches(parts, options, unit, control);
  searches.lower();
  for (std::size_t k = 0; k < parts.size(); ++k) {
    const std::vector<Offset>& offsets = searches.offsets(k);
    for (ItemId i = 0; i < parts[k].num_items(); ++i) result.offsets[parts[k].buffers[i]] = unit * offsets[i];
  }
  result.height = unit * searches.height();
  result.load = unit * searches.load();
  result.bound = unit * searches.bound();
  return result;
}

// Tries a layout that keeps all compatible preferred offsets, then moves buffers to preferred offsets that happen to be free.
void prefer(std::span<const Buffer> buffers, const std::vector<Bytes>& sizes, LayoutOptions options, Control& control,
            LayoutResult& result) {
  const auto stop = [&] { return control.stop(result.height, result.bound); };
  options.capacity = result.height;
  LayoutResult wished = place(buffers, sizes, given_places(buffers, sizes, options.alignment, result.height), options, control);
  if (wished.height <= result.height) {
    result.height = wished.height;
    result.offsets = std::move(wished.offsets);
  }
  move_to_preferred(buffers, sizes, result.height, stop, result.offsets);
}

}  // namespace

LayoutResult layout(std::span<const Buffer> buffers, const LayoutOptions& options, Control& control) {
  if (options.capacity < 0) {
    throw PlanError("capacity is " + std::to_string(options.capacity) + " bytes, expected 0 or more", "capacity", {});
  }
  const std::vector<Bytes> sizes = rounded_sizes(buffers, options.alignment);
  LayoutResult result = place(buffers, sizes, given_places(buffers, sizes, options.alignment, -1), options, control);
  const bool any_preferred = std::ranges::any_of(buffers, [](const Buffer& b) { return b.preferred != kFree; });
  if (any_preferred && !control.stop(result.height, result.bound)) prefer(buffers, sizes, options, control, result);
  if (result.height == result.bound) result.status = Status::kOptimal;
  return result;
}

}  // namespace olla
