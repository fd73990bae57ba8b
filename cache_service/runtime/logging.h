// Structured logs on standard error: text, or one JSON object a line.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace heavywater {

struct LoggingOptions {
  std::string level = "info";  // trace, debug, info, warn, error
  bool json = false;
  std::string process;  // shown in every line: "heavywater-cache"
};

// INVALID_ARGUMENT naming log_level and its values. Before the first call, logs
// are text at level info.
absl::Status InitLogging(const LoggingOptions& options);

// One named value of a log line.
struct LogField {
  template <typename T>
  LogField(absl::string_view name, const T& value) : name(name), value(absl::StrCat(value)) {}
  // Debian's absl::string_view is a type of its own.
  LogField(absl::string_view name, std::string_view value) : name(name), value(value) {}
  std::string name;
  std::string value;
};
using LogFields = std::initializer_list<LogField>;

// LogInfo("sequence opened", {{"sequence", id}, {"tenant", tenant}});
// In a ScopedTrace (trace_context.h) the field "trace" follows.
// Thread safe.
void LogDebug(absl::string_view message, LogFields fields = {});
void LogInfo(absl::string_view message, LogFields fields = {});
void LogWarn(absl::string_view message, LogFields fields = {});
void LogError(absl::string_view message, LogFields fields = {});

}  // namespace heavywater
