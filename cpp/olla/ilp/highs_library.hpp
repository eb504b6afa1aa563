// HiGHS by its C interface, taken at run time from a shared library, such as the one that highspy 1.15 brings.
// No header of HiGHS is needed to compile it and no copy of HiGHS is built.
#pragma once

#include <memory>
#include <string>

#include "olla/ilp/highs_engine.hpp"

namespace olla {

// Opens the library; it stays in memory until the process ends. Throws SolverError where it is missing, is no HiGHS, is older
// than 1.15 or counts in 64-bit integers.
std::shared_ptr<const HighsEngine> highs_library(const std::string& path);

}  // namespace olla
