// A hash of 64 bits, for signatures that are sums.
#pragma once

#include <cstdint>

namespace olla {

// Every bit of x changes about half of the result's (as the finalizers of MurmurHash3 and SplitMix64 do); one-to-one, and 0 for 0.
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
  return x ^ x >> 32;
}

}  // namespace olla
