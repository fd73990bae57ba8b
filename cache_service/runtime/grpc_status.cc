#include "cache_service/runtime/grpc_status.h"

#include <cinttypes>
#include <cstdio>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/elsewhere.h"
#include "cache_service/base/shortage.h"
#include "heavywater/v1/error_details.pb.h"

namespace heavywater {
namespace {

// HTTP/2 trailers are limited (8 KiB by default in gRPC); a longer message would
// arrive as an unexplained RESOURCE_EXHAUSTED instead.
constexpr size_t kMaxMessageBytes = 2048;
constexpr char kTypes[] = "type.googleapis.com/google.rpc.";

template <typename Message>
void AddDetail(const char* type, const Message& message, v1::RpcStatus* status) {
  google::protobuf::Any& detail = *status->add_details();
  detail.set_type_url(absl::StrCat(kTypes, type));
  detail.set_value(message.SerializeAsString());
}

std::string ElsewhereDetails(const absl::Status& status, const std::string& address) {
  v1::RpcStatus proto;
  proto.set_code(status.raw_code());
  v1::ErrorInfo info;
  info.set_reason("SEQUENCE_ELSEWHERE");
  info.set_domain("heavywater");
  (*info.mutable_metadata())["address"] = address;
  AddDetail("ErrorInfo", info, &proto);
  return proto.SerializeAsString();
}

// google.rpc.Status, or nothing.
std::string DetailsOf(const absl::Status& status) {
  const std::optional<std::string> elsewhere = ElsewhereOf(status);
  if (elsewhere.has_value()) return ElsewhereDetails(status, *elsewhere);
  const std::optional<Shortage> shortage = ShortageOf(status);
  if (!shortage.has_value()) return "";
  v1::RpcStatus proto;
  proto.set_code(status.raw_code());
  v1::QuotaFailure failure;
  v1::QuotaFailure::Violation& violation = *failure.add_violations();
  violation.set_subject(shortage->subject);
  violation.set_description(absl::StrCat("need ", shortage->need, ", available ",
                                         shortage->available, ", limit ", shortage->limit));
  AddDetail("QuotaFailure", failure, &proto);
  if (shortage->retry_after != absl::InfiniteDuration()) {
    const int64_t ms = absl::ToInt64Milliseconds(shortage->retry_after);
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(ms / 1000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(ms % 1000 * 1'000'000));
    AddDetail("RetryInfo", retry, &proto);
  }
  return proto.SerializeAsString();
}

// What DetailsOf() wrote, for a server to pass on; none where it is anything else.
std::optional<Shortage> ParseDetails(const std::string& details) {
  v1::RpcStatus proto;
  if (details.empty() || !proto.ParseFromString(details)) return std::nullopt;
  std::optional<Shortage> shortage;
  v1::RetryInfo retry;
  for (const google::protobuf::Any& detail : proto.details()) {
    v1::QuotaFailure failure;
    if (detail.type_url() == absl::StrCat(kTypes, "QuotaFailure") &&
        failure.ParseFromString(detail.value()) && failure.violations_size() == 1) {
      Shortage& parsed = shortage.emplace();
      const v1::QuotaFailure::Violation& violation = failure.violations(0);
      parsed.subject = violation.subject();
      if (std::sscanf(violation.description().c_str(),
                      "need %" SCNd64 ", available %" SCNd64 ", limit %" SCNd64, &parsed.need,
                      &parsed.available, &parsed.limit) != 3) {
        return std::nullopt;
      }
    }
    if (detail.type_url() == absl::StrCat(kTypes, "RetryInfo")) {
      (void)retry.ParseFromString(detail.value());
    }
  }
  if (shortage.has_value() && retry.has_retry_delay()) {
    shortage->retry_after = absl::Seconds(retry.retry_delay().seconds()) +
                            absl::Nanoseconds(retry.retry_delay().nanos());
  }
  return shortage;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(status.message().substr(0, kMaxMessageBytes));
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), message, DetailsOf(status));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  if (code == absl::StatusCode::kResourceExhausted) {
    const std::optional<Shortage> shortage = ParseDetails(status.error_details());
    if (shortage.has_value()) return ExhaustedError(status.error_message(), *shortage);
  }
  return absl::Status(code, status.error_message());
}

}  // namespace heavywater
