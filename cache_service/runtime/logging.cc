#include "cache_service/runtime/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "cache_service/runtime/trace_context.h"

namespace heavywater {
namespace {

std::atomic<bool> json_lines = false;

void AppendEscaped(absl::string_view text, std::string* out) {
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(out, "\\u%04x", c);
    } else {
      out->push_back(c);
    }
  }
}

void AppendJsonPair(absl::string_view name, absl::string_view value, std::string* out) {
  absl::StrAppend(out, "\"", name, "\":\"");
  AppendEscaped(value, out);
  out->push_back('"');
}

// Calls append(name, value) for each, and for the thread's trace.
template <class Append>
void ForFields(LogFields fields, const Append& append) {
  for (const LogField& field : fields) append(field.name, field.value);
  if (!ScopedTrace::Current().empty()) append("trace", ScopedTrace::Current());
}

std::string FormatJson(absl::string_view message, LogFields fields) {
  std::string line;
  AppendJsonPair("message", message, &line);
  const auto append = [&line](absl::string_view name, absl::string_view value) {
    line += ',';
    AppendJsonPair(name, value, &line);
  };
  ForFields(fields, append);
  return line;
}

std::string FormatText(absl::string_view message, LogFields fields) {
  std::string line(message);
  const auto append = [&line](absl::string_view name, absl::string_view value) {
    absl::StrAppend(&line, " ", name, "=\"");
    AppendEscaped(value, &line);
    line += '"';
  };
  ForFields(fields, append);
  return line;
}

// The process' logger, on standard error. Never destroyed: gRPC's threads may log to the end.
spdlog::logger& Logger() {
  static const auto* const logger = new std::shared_ptr<spdlog::logger>([] {
    auto made = std::make_shared<spdlog::logger>("heavywater",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
    made->flush_on(spdlog::level::trace);
    return made;
  }());
  return **logger;
}

void Log(spdlog::level::level_enum level, absl::string_view message, LogFields fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(level)) return;
  const std::string line = json_lines ? FormatJson(message, fields) : FormatText(message, fields);
  logger.log(level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace

absl::Status InitLogging(const LoggingOptions& options) {
  static constexpr std::pair<absl::string_view, spdlog::level::level_enum> kLevels[] = {
      {"trace", spdlog::level::trace},
      {"debug", spdlog::level::debug},
      {"info", spdlog::level::info},
      {"warn", spdlog::level::warn},
      {"error", spdlog::level::err}};
  spdlog::level::level_enum level = spdlog::level::off;
  for (const auto& [name, value] : kLevels) {
    if (options.level == name) level = value;
  }
  if (level == spdlog::level::off) {
    return absl::InvalidArgumentError(absl::StrCat("log_level is \"", options.level,
                                                   "\", want trace, debug, info, warn or error"));
  }
  json_lines = options.json;
  Logger().set_level(level);
  Logger().set_pattern(options.json
                           ? absl::StrCat("{\"time\":\"%Y-%m-%dT%H:%M:%S.%e%z\",\"level\":\"%l\",",
                                          "\"process\":\"", options.process, "\",%v}")
                           : absl::StrCat("%Y-%m-%dT%H:%M:%S.%e%z %l ", options.process, " %v"));
  return absl::OkStatus();
}

void LogDebug(absl::string_view message, LogFields fields) {
  Log(spdlog::level::debug, message, fields);
}
void LogInfo(absl::string_view message, LogFields fields) {
  Log(spdlog::level::info, message, fields);
}
void LogWarn(absl::string_view message, LogFields fields) {
  Log(spdlog::level::warn, message, fields);
}
void LogError(absl::string_view message, LogFields fields) {
  Log(spdlog::level::err, message, fields);
}

}  // namespace heavywater
