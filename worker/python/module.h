// The parts of the Python module heavywater._engine.
#pragma once

#include <nanobind/nanobind.h>

namespace heavywater {

void BindOptions(nanobind::module_& module);
void BindGroup(nanobind::module_& module);
void BindEngine(nanobind::module_& module);

}  // namespace heavywater
