#include <cstdlib>

#include "olla/ilp/highs.hpp"
#include "test.hpp"

using namespace olla;

TEST(a_missing_library_is_refused) { CHECK_THROWS(Highs("/nowhere/libhighs.so.1"), SolverError, "solver"); }

TEST(a_library_without_highs_is_refused_with_the_missing_function_named) {
  std::string message;
#ifdef __APPLE__
  const char* other = "/usr/lib/libSystem.B.dylib";
#else
  const char* other = "libm.so.6";
#endif
  try {
    Highs highs(other);
  } catch (const SolverError& error) {
    message = error.what();
  }
  CHECK(message.find("Highs_") != std::string::npos);
  CHECK(message.find("pip install") != std::string::npos);
}

OLLA_TEST_MAIN
