// A hash of 64 bits, for signatures that are sums, and random bits by it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace olla {

// Every bit of x changes about half of the result's (as the finalizers of MurmurHash3 and SplitMix64 do); one-to-one, and 0 for 0.
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  return x ^ x >> 32;
}

// Random bits in a few cycles (SplitMix64's way: the hash of a counter), where a search draws them all the time.
struct FastRandom {
  using result_type = std::uint64_t;
  std::uint64_t state = 0;

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~result_type{0}; }
  constexpr result_type operator()() { return mixed(state += 0x9e3779b97f4a7c15ull); }
  constexpr std::size_t below(std::size_t count) { return static_cast<std::size_t>(((*this)() >> 32) * count >> 32); }  // < 2^32
  constexpr bool chance(double share) { return static_cast<double>((*this)() >> 11) < share * 0x1p53; }
};

}  // namespace olla
