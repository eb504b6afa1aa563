// Operators that only CUDA has, by what the CPU has.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>

namespace standin {

// Computes an operator's results from its arguments on the CPU; draws, if any, begin at the seed.
using Special = torch::jit::Stack (*)(const torch::jit::Stack& arguments, std::uint64_t seed);

// nullptr: none is needed, or known.
Special special_of(const std::string& name);

}  // namespace standin
