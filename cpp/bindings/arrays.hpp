// Arrays between numpy and the core. Inputs must have the exact dtype and be contiguous: nothing is converted silently.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <optional>

#include "olla/base/control.hpp"
#include "olla/base/types.hpp"

namespace olla::bindings {

namespace nb = nanobind;
using namespace nb::literals;

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumpyArray = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

template <class T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <class T>
std::vector<T> copy(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

// As (offset, item). Graph's constructor checks that the two fit each other.
using Lists = std::pair<Array<std::int64_t>, Array<std::int32_t>>;
inline Csr<std::int32_t> csr(const Lists& lists) { return {copy(lists.first), copy(lists.second)}; }

// The vector's memory becomes the numpy array's: no copy.
template <class T>
NumpyArray<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return NumpyArray<T>(owned->data(), {owned->size()}, owner);
}

// For attributes of a bound class: a vector it holds, reached through members one after the other, as an array over the same
// memory; lists as a pair (offset, item) of such arrays. The arrays keep the object alive: no copy. Those of a const class are
// read-only.
template <class Class, class... Members>
auto array(Members... members) {
  return [=](Class& self) {
    auto& values = (self.*....*members);
    return NumpyArray<std::remove_pointer_t<decltype(values.data())>>(values.data(), {values.size()});
  };
}
template <class Class, class... Members>
auto lists(Members... members) {
  return [=](nb::handle_t<std::remove_const_t<Class>> self) {
    auto& csr = (nb::cast<Class&>(self).*....*members);
    const auto array_of = [&](auto& values) {
      return NumpyArray<std::remove_pointer_t<decltype(values.data())>>(values.data(), {values.size()}, self);
    };
    return std::pair(array_of(csr.offset), array_of(csr.item));
  };
}

// For an attribute whose arrays own their memory.
inline constexpr auto kOwned = nb::rv_policy::automatic;

// For such an attribute: one field of the items of a vector, copied.
template <class Class, class Item, class Field>
auto column(std::vector<Item> Class::* items, Field Item::* field) {
  return [=](const Class& self) {
    std::vector<Field> values;
    for (const Item& item : self.*items) values.push_back(item.*field);
    return to_numpy(std::move(values));
  };
}

template <class Work>
auto without_gil(const Work& work) {
  nb::gil_scoped_release release;
  return work();
}

// Limits that end a search before it is done. progress(stage, seconds, value, bound) -> bool, or None; it may be None.
struct Limits {
  double time_limit;
  std::optional<std::int64_t> max_work;  // none: any number
  nb::object progress;
};

// Runs work(control) without the GIL, which progress takes for its call. Returns true if Ctrl-C or an answer of False asked the
// search to stop with the best it has. Any other Python error stops it too, and is thrown once the search has returned.
bool limited(const char* stage, const Limits& limits, const std::function<void(Control&)>& work);

// What a search found, and whether Ctrl-C or progress ended it.
template <class Result>
struct Found : Result {
  bool cancelled = false;
};

template <class Work>
auto search(const char* stage, const Limits& limits, Work work) {
  Found<std::invoke_result_t<Work, Control&>> found;
  found.cancelled = limited(stage, limits, [&](Control& control) { found = {work(control), false}; });
  return found;
}

}  // namespace olla::bindings
