#include "cache_service/runtime/trace_context.h"

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace heavywater {
namespace {

constexpr char kHeader[] = "traceparent";
constexpr size_t kTraceIdSize = 32;
// Version, trace id, parent id, flags: "00-" 32 "-" 16 "-" 2. Later versions may be longer.
constexpr size_t kHeaderSize = 55;

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsTraceId(std::string_view id) {
  return IsHex(id) && id.find_first_not_of('0') != std::string_view::npos;
}

std::string& CurrentId() {
  thread_local std::string id;
  return id;
}

std::string RandomHex16() {
  thread_local absl::BitGen random;
  return absl::StrFormat("%016x", absl::Uniform<uint64_t>(absl::IntervalOpen, random, 0, ~0ull));
}

}  // namespace

std::string TraceIdOf(std::string_view traceparent) {
  const bool is_whole = traceparent.size() == kHeaderSize ||
                        (traceparent.size() > kHeaderSize && traceparent[kHeaderSize] == '-');
  if (!is_whole || traceparent[2] != '-' || traceparent[35] != '-' || traceparent[52] != '-') {
    return "";
  }
  const std::string_view version = traceparent.substr(0, 2);
  if (!IsHex(version) || version == "ff" ||
      (version == "00" && traceparent.size() != kHeaderSize)) {
    return "";
  }
  const std::string_view id = traceparent.substr(3, kTraceIdSize);
  return IsTraceId(id) ? std::string(id) : "";
}

std::string TraceIdOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(kHeader);
  if (found == context.client_metadata().end()) return "";
  return TraceIdOf(std::string_view(found->second.data(), found->second.size()));
}

std::string NewTraceId() { return absl::StrCat(RandomHex16(), RandomHex16()); }

ScopedTrace::ScopedTrace(std::string trace_id)
    : before_(std::exchange(CurrentId(), std::move(trace_id))) {}

ScopedTrace::~ScopedTrace() { CurrentId() = std::move(before_); }

const std::string& ScopedTrace::Current() { return CurrentId(); }

void SendTrace(grpc::ClientContext& context) {
  const std::string& id = ScopedTrace::Current();
  if (!id.empty()) context.AddMetadata(kHeader, absl::StrCat("00-", id, "-", RandomHex16(), "-01"));
}

}  // namespace heavywater
