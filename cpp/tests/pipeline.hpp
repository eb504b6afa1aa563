// Buffers of a pipeline's stage, for tests of what repeats.
#pragma once

#include "buffers.hpp"

namespace olla {

// A pipeline: every microbatch is alive over ahead others, with temporaries; a weight from the start, one from the first batch on.
inline std::vector<Buffer> microbatches(std::int64_t count, std::int64_t ahead, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Bytes> kept, scratch;
  for (int k = 0; k < 6; ++k) {
    kept.push_back(1 + random() % 40);
    scratch.push_back(1 + random() % 30);
  }
  const std::int64_t width = 12, end = (count + ahead) * width;
  std::vector<Buffer> buffers = {{0, end, 7}, {ahead * width, end, 5}};
  for (std::int64_t batch = 0; batch < count; ++batch) {
    for (std::int64_t k = 0; k < 6; ++k) {
      const std::int64_t birth = batch * width + k;
      buffers.push_back({birth, (batch + ahead) * width + width - k, kept[k]});
      buffers.push_back({birth + 6, birth + 8, scratch[k]});
    }
  }
  return buffers;
}

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

// Interleaved: two chunks of nine equal ops, groups of two microbatches, four visits ahead; five microbatches are alive at once,
// and die in an order in which every two of the five rooms follow each other. When the last blocks of one die, scratch of 186 fits
// only beside them.
inline std::vector<Buffer> interleaved(std::int64_t num_groups) {
  struct Op {
    Bytes saved, scratch;
    std::int64_t steps;
    Bytes gradient;
  };
  constexpr std::int64_t kOps = 9, kAhead = 4;
  constexpr Op kOp[kOps] = {{282, 155, 2, 89}, {225, 119, 2, 110}, {73, 144, 2, 141}, {147, 101, 1, 17}, {109, 51, 1, 37},
                            {319, 27, 1, 26},  {191, 68, 1, 186},  {16, 17, 1, 25},   {78, 64, 2, 63}};
  const std::int64_t num_visits = 4 * num_groups;
  std::vector<Buffer> buffers;
  std::vector<std::int64_t> births(num_visits);
  std::int64_t now = 0;
  for (std::int64_t step = 0; step < num_visits + kAhead; ++step) {
    if (step < num_visits) {
      births[step] = now;
      for (const Op& op : kOp) {
        buffers.push_back({now, now + op.steps, op.scratch});
        ++now;
      }
    }
    if (step < kAhead) continue;
    const std::int64_t visit = step - kAhead, birth = births[visit % 4 < 2 ? visit + 2 : visit - 2];  // the last chunk first
    for (std::int64_t k = kOps - 1; k >= 0; --k, ++now) {
      buffers.push_back({birth + k, now + 1, kOp[k].saved});
      buffers.push_back({now, now + 2, kOp[k].gradient});
    }
  }
  return buffers;
}

}  // namespace olla
