// EngineGroup for Python: its store is two of the caller's functions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "worker/python/engine_group.h"
#include "worker/python/module.h"
#include "worker/python/status_to_python.h"

namespace heavywater {

namespace nb = nanobind;

namespace {

std::string AsString(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// What the caller's function has raised, for the status that Connect() returns.
absl::Status Raised(const char* what, const std::string& key, const std::exception& error) {
  return absl::UnavailableError(absl::StrCat(what, " of ", key, ": ", error.what()));
}

std::shared_ptr<EngineGroup> Connect(int rank, int size, const nb::callable& put,
                                     const nb::callable& wait, const std::string& listen_address,
                                     double timeout_s) {
  const CallerStore store{
      .put = [&put](const std::string& key, const std::string& value) -> absl::Status {
        const nb::gil_scoped_acquire held;
        try {
          put(key, nb::bytes(value.data(), value.size()));
        } catch (const std::exception& error) {
          return Raised("put", key, error);
        }
        return absl::OkStatus();
      },
      .wait = [&wait](const std::string& key,
                      absl::Duration timeout) -> absl::StatusOr<std::string> {
        const nb::gil_scoped_acquire held;
        try {
          return AsString(nb::cast<nb::bytes>(wait(key, absl::ToDoubleSeconds(timeout))));
        } catch (const std::exception& error) {
          return Raised("wait", key, error);
        }
      }};
  const GlooOptions options{.rank = rank,
                            .size = size,
                            .listen_address = listen_address,
                            .timeout = absl::Seconds(timeout_s),
                            .key_prefix = "heavywater"};
  absl::StatusOr<std::shared_ptr<EngineGroup>> group;
  {
    const nb::gil_scoped_release released;
    group = EngineGroup::Connect(options, store);
  }
  return ValueOrRaise(std::move(group));
}

}  // namespace

void BindGroup(nb::module_& module) {
  nb::class_<EngineGroup>(module, "EngineGroup")
      .def(nb::new_(&Connect), nb::arg("rank"), nb::arg("size"), nb::arg("put"), nb::arg("wait"),
           nb::arg("listen_address"), nb::arg("timeout_s"))
      .def_prop_ro("rank", &EngineGroup::rank)
      .def_prop_ro("size", &EngineGroup::size);
}

}  // namespace heavywater
