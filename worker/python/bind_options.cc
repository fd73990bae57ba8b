// PolicyOptions for Python: the fields under their C++ names, enumerations by the names
// that configuration uses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "worker/policy/policy.h"
#include "worker/python/module.h"
#include "worker/python/status_to_python.h"

namespace heavywater {

namespace nb = nanobind;

void BindOptions(nb::module_& module) {
  nb::class_<RecallOptions>(module, "RecallOptions")
      .def_rw("enabled", &RecallOptions::enabled)
      .def_rw("all", &RecallOptions::all)
      .def_rw("recall_tokens", &RecallOptions::recall_tokens)
      .def_rw("min_share", &RecallOptions::min_share)
      .def_rw("sketch_channels", &RecallOptions::sketch_channels)
      .def_rw("promote_candidates", &RecallOptions::promote_candidates);
  nb::class_<PolicyOptions>(module, "PolicyOptions")
      .def_prop_rw(
          "policy", [](const PolicyOptions& o) { return std::string(PolicyName(o.policy)); },
          [](PolicyOptions& o, const std::string& name) {
            o.policy = ValueOrRaise(ParsePolicy(name));
          })
      .def_prop_rw(
          "scope", [](const PolicyOptions& o) { return std::string(ScopeName(o.scope)); },
          [](PolicyOptions& o, const std::string& name) {
            o.scope = ValueOrRaise(ParseScope(name));
          })
      .def_prop_rw(
          "head_budgets",
          [](const PolicyOptions& o) { return std::string(HeadBudgetsName(o.head_budgets)); },
          [](PolicyOptions& o, const std::string& name) {
            o.head_budgets = ValueOrRaise(ParseHeadBudgets(name));
          })
      .def_rw("head_budget_floor", &PolicyOptions::head_budget_floor)
      .def_rw("heavy_tokens", &PolicyOptions::heavy_tokens)
      .def_rw("recent_tokens", &PolicyOptions::recent_tokens)
      .def_rw("heavy_ratio", &PolicyOptions::heavy_ratio)
      .def_rw("recent_ratio", &PolicyOptions::recent_ratio)
      .def_rw("sink_tokens", &PolicyOptions::sink_tokens)
      .def_rw("min_budget_tokens", &PolicyOptions::min_budget_tokens)
      .def_rw("window", &PolicyOptions::window)
      .def_rw("pool_kernel", &PolicyOptions::pool_kernel)
      .def_rw("plan_interval_steps", &PolicyOptions::plan_interval_steps)
      .def_rw("decay", &PolicyOptions::decay)
      .def_rw("exposure", &PolicyOptions::exposure)
      .def_rw("history_window", &PolicyOptions::history_window)
      .def_rw("pyramid_beta", &PolicyOptions::pyramid_beta)
      .def_rw("pooled_seeds", &PolicyOptions::pooled_seeds)
      .def_rw("device_ratio", &PolicyOptions::device_ratio)
      .def_rw("recall", &PolicyOptions::recall);
  module.def(
      "preset", [](const std::string& name) { return ValueOrRaise(Preset(name)); },
      nb::arg("name"));
}

}  // namespace heavywater
