// Buffers of a pipeline's stage, for tests of what repeats.
#pragma once

#include "buffers.hpp"

namespace olla {

// One forward, one backward: ahead + 1 microbatches in flight, which the first ones reach and the last ones leave without the other
// direction in between; scratch of one or two ops, gradients, weights from the first backward on.
inline std::vector<Buffer> one_forward_one_backward(std::int64_t count, std::int64_t ahead, std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto bytes = [&] { return static_cast<Bytes>(1 + random() % 40); };
  constexpr std::int64_t kOps = 5;
  std::vector<Bytes> saved, scratch, gradient, weight;
  std::vector<std::int64_t> steps;
  for (std::int64_t k = 0; k < kOps; ++k) {
    for (std::vector<Bytes>* sizes : {&saved, &scratch, &gradient, &weight}) sizes->push_back(bytes());
    steps.push_back(1 + random() % 2);
  }
  std::vector<Buffer> buffers;
  std::vector<std::int64_t> births(count);
  std::int64_t now = 0;
  const auto forward = [&](std::int64_t batch) {
    births[batch] = now;
    for (std::int64_t k = 0; k < kOps; ++k) buffers.push_back({now + k, now + k + steps[k], scratch[k]});
    now += kOps;
  };
  for (std::int64_t batch = 0; batch < ahead; ++batch) forward(batch);
  const std::int64_t first_backward = now + kOps;
  for (std::int64_t batch = 0; batch < count; ++batch) {
    if (batch + ahead < count) forward(batch + ahead);
    for (std::int64_t k = kOps - 1; k >= 0; --k, ++now) {
      buffers.push_back({births[batch] + k, now + 1, saved[k]});
      buffers.push_back({now, now + 2, gradient[k]});
    }
  }
  for (const Bytes size : weight) buffers.push_back({first_backward, now, size});
  return buffers;
}

}  // namespace olla
