#include "worker/python/status_to_python.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

namespace heavywater {

namespace nb = nanobind;

void RaiseIfError(const absl::Status& status) {
  if (status.ok()) return;
  const nb::object error = nb::module_::import_("heavywater.errors").attr("HeavywaterError");
  const nb::object raised =
      error(absl::StatusCodeToString(status.code()), std::string(status.message()));
  PyErr_SetObject(error.ptr(), raised.ptr());
  throw nb::python_error();
}

}  // namespace heavywater
