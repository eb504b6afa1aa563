// The whole test framework. One binary per unit: TEST(claim) { CHECK...; } as often as needed, then OLLA_TEST_MAIN at the end.
#pragma once

#include <concepts>
#include <functional>
#include <iostream>
#include <ranges>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace olla::test {

// Searches take ten times as long under sanitizers: there, long tests do less.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline std::vector<std::pair<const char*, std::function<void()>>> tests;
inline int failures = 0;

inline bool add(const char* name, void (*body)()) { return tests.emplace_back(name, body), true; }

inline void fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::cerr << file << ":" << line << ": " << what << "\n";
}

template <class T>
std::string shown(const T& value) {
  std::ostringstream text;
  if constexpr (requires { text << value; })
    text << value;
  else if constexpr (std::ranges::range<T>)
    for (const auto& item : value) text << shown(item) << " ";
  else
    text << "(a value that cannot be printed)";
  return text.str();
}

inline int run() {
  for (const auto& [name, body] : tests) {
    const int before = failures;
    try {
      body();
    } catch (const std::exception& error) {
      fail(name, 0, std::string("unexpected exception: ") + error.what());
    }
    std::cerr << (failures == before ? "ok   " : "FAIL ") << name << "\n";
  }
  return failures == 0 && !tests.empty() ? 0 : 1;
}

}  // namespace olla::test

#define TEST(name)                                               \
  static void name();                                            \
  static const bool name##_added = olla::test::add(#name, name); \
  static void name()
#define CHECK(...)                                                                       \
  do {                                                                                   \
    if (!(__VA_ARGS__)) olla::test::fail(__FILE__, __LINE__, "not true: " #__VA_ARGS__); \
  } while (false)
#define CHECK_EQ(a, ...)                                                                                                 \
  do {                                                                                                                   \
    const auto check_seen_ = (a);                                                                                        \
    const decltype(check_seen_) check_expected_ = __VA_ARGS__;                                                           \
    if (!(check_seen_ == check_expected_))                                                                               \
      olla::test::fail(__FILE__, __LINE__,                                                                               \
                       #a " is " + olla::test::shown(check_seen_) + ", expected " + olla::test::shown(check_expected_)); \
  } while (false)
#define CHECK_THROWS(expr, Type, rule_)                                                                                        \
  do {                                                                                                                         \
    std::string check_seen_ = "(nothing thrown)";                                                                              \
    try {                                                                                                                      \
      static_cast<void>(expr);                                                                                                 \
    } catch (const Type& error) {                                                                                              \
      check_seen_ = error.rule();                                                                                              \
    }                                                                                                                          \
    if (check_seen_ != (rule_)) olla::test::fail(__FILE__, __LINE__, #expr ": rule " + check_seen_ + ", expected " + (rule_)); \
  } while (false)
#define OLLA_TEST_MAIN \
  int main() { return olla::test::run(); }
