// Errors name what is wrong, the value seen and the ids concerned. Limits (time, gap) are statuses, not errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace olla {

class Error : public std::runtime_error {
 public:
  Error(const std::string& message, std::string rule, std::vector<std::int64_t> ids)
      : std::runtime_error(message), rule_(std::move(rule)), ids_(std::move(ids)) {}
  const std::string& rule() const { return rule_; }              // short name of the broken rule: "cycle"
  const std::vector<std::int64_t>& ids() const { return ids_; }  // ops or tensors concerned, as the message says

 private:
  std::string rule_;
  std::vector<std::int64_t> ids_;
};

struct GraphError : Error {
  using Error::Error;
};
struct PlanError : Error {
  using Error::Error;
};
struct SolverError : Error {
  explicit SolverError(const std::string& message) : Error(message, "solver", {}) {}
};

}  // namespace olla
