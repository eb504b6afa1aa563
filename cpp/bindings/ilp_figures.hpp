// Results of the integer programs as Python sees them.
#pragma once

#include "arrays.hpp"
#include "olla/ilp/ilp_search.hpp"

namespace olla::bindings {

inline const char* name_of(Status status) { return status == Status::kOptimal ? "optimal" : "feasible"; }

inline nb::dict dict_of(const IlpFigures& figures) {
  nb::dict info;
  info["num_columns"] = figures.num_columns;
  info["num_rows"] = figures.num_rows;
  info["num_nonzeros"] = figures.num_nonzeros;
  info["num_nodes"] = figures.num_nodes;
  info["seconds_build"] = figures.seconds_build;
  info["seconds_solve"] = figures.seconds_solve;
  info["message"] = figures.message.c_str();
  return info;
}

}  // namespace olla::bindings
