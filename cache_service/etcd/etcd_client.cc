#include "cache_service/etcd/etcd_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/etcd/etcd_rpc.grpc.pb.h"
#include "cache_service/security/address.h"
#include "cache_service/security/small_file.h"

namespace heavywater {
namespace {

namespace rpc = etcdserverpb;

constexpr int64_t kPageEntries = 500;
constexpr size_t kMaxEndpoints = 16;
constexpr absl::Duration kConnectTimeout = absl::Milliseconds(500);
// Above what a page of entries may take.
constexpr int kMaxMessageBytes = 64 << 20;

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // It is asked again and again anyway: what counts is to be there soon after it is.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Above the least interval that etcd allows (5 s).
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  return arguments;
}

// The token has ended, or the member has begun anew and knows none.
bool WantsToken(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         absl::StrContains(status.error_message(), "user name is empty") ||
         absl::StrContains(status.error_message(), "auth store is old");
}

EtcdEntry EntryOf(rpc::KeyValue& kv) {
  return {.key = std::move(*kv.mutable_key()),
          .value = std::move(*kv.mutable_value()),
          .revision = kv.mod_revision()};
}

absl::Status CheckOptions(const EtcdOptions& options) {
  if (options.endpoints.empty() || options.endpoints.size() > kMaxEndpoints) {
    return absl::InvalidArgumentError(absl::StrCat("etcd_endpoints has ", options.endpoints.size(),
                                                   " addresses, want 1 to ", kMaxEndpoints));
  }
  if (options.user.empty() != options.password_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("of etcd's user and password only ",
                     options.user.empty() ? "etcd_password_file" : "etcd_user",
                     " is set, want both or neither"));
  }
  for (const std::string& endpoint : options.endpoints) {
    const size_t colon = endpoint.rfind(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == endpoint.size() ||
        absl::StrContains(endpoint, "/")) {
      return absl::InvalidArgumentError(
          absl::StrCat("etcd_endpoints has \"", endpoint, "\", want HOST:PORT"));
    }
    const bool plaintext = options.security.ca_file.empty() && !options.allow_plaintext;
    if (!options.user.empty() && plaintext && !IsLoopback(endpoint)) {
      return absl::InvalidArgumentError(
          absl::StrCat("etcd_password_file would go to ", endpoint,
                       " in plaintext, want etcd_ca_file, an address of this machine, or "
                       "allow_plaintext: true"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

struct EtcdClient::Member {
  Member(std::string its_address, std::shared_ptr<grpc::Channel> its_channel)
      : address(std::move(its_address)),
        channel(std::move(its_channel)),
        kv(channel),
        lease(channel),
        watch(channel),
        auth(channel) {}

  // gRPC reads from a new connection only while somebody waits for it: calls that fail at
  // once, one after the other, would never connect.
  void Connect(absl::Duration limit) const {
    if (channel->GetState(/*try_to_connect=*/true) == GRPC_CHANNEL_READY) return;
    (void)channel->WaitForConnected(absl::ToChronoTime(absl::Now() + limit));
  }

  absl::Status StatusOf(const grpc::Status& status) const {
    if (status.ok()) return absl::OkStatus();
    auto code = static_cast<absl::StatusCode>(status.error_code());
    if (code == absl::StatusCode::kDeadlineExceeded) code = absl::StatusCode::kUnavailable;
    return absl::Status(code, absl::StrCat("etcd at ", address, ": ", status.error_message()));
  }

  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  rpc::KV::Stub kv;
  rpc::Lease::Stub lease;
  rpc::Watch::Stub watch;
  rpc::Auth::Stub auth;
};

std::string EndOfPrefix(std::string prefix) {
  while (!prefix.empty()) {
    if (static_cast<unsigned char>(prefix.back()) < 0xff) {
      ++prefix.back();
      return prefix;
    }
    prefix.pop_back();
  }
  return std::string(1, '\0');  // etcd: all keys from there on
}

EtcdClient::EtcdClient(const EtcdOptions& options, std::unique_ptr<Channels> channels,
                       std::vector<std::unique_ptr<Member>> members)
    : options_(options), channels_(std::move(channels)), members_(std::move(members)) {}
EtcdClient::~EtcdClient() = default;

absl::StatusOr<std::unique_ptr<EtcdClient>> EtcdClient::Create(const EtcdOptions& options) {
  HW_RETURN_IF_ERROR(CheckOptions(options));
  HW_ASSIGN_OR_RETURN(auto channels, Channels::Create(options.security));
  std::vector<std::unique_ptr<Member>> members;
  for (const std::string& endpoint : options.endpoints) {
    HW_ASSIGN_OR_RETURN(auto channel, channels->Make(endpoint, Arguments()));
    members.push_back(std::make_unique<Member>(endpoint, std::move(channel)));
  }
  return std::unique_ptr<EtcdClient>(
      new EtcdClient(options, std::move(channels), std::move(members)));
}

absl::Status EtcdClient::Run(const Call& call) {
  size_t first = 0;
  {
    MutexLock lock(&mutex_);
    first = current_;
  }
  absl::Status status;
  for (size_t tried = 0; tried < members_.size(); ++tried) {
    const size_t index = (first + tried) % members_.size();
    status = RunAt(*members_[index], call);
    if (absl::IsUnavailable(status)) continue;
    MutexLock lock(&mutex_);
    current_ = index;
    return status;
  }
  return status;
}

absl::Status EtcdClient::RunAt(Member& member, const Call& call) {
  member.Connect(std::min(options_.timeout, kConnectTimeout));
  for (bool again = false;; again = true) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + options_.timeout));
    HW_RETURN_IF_ERROR(AddToken(member, context));
    const grpc::Status status = call(member, context);
    if (again || options_.user.empty() || !WantsToken(status)) return member.StatusOf(status);
    MutexLock lock(&mutex_);
    token_.clear();
  }
}

absl::Status EtcdClient::AddToken(Member& member, grpc::ClientContext& context) {
  if (options_.user.empty()) return absl::OkStatus();
  std::string token;
  {
    MutexLock lock(&mutex_);
    token = token_;
  }
  if (token.empty()) {
    HW_ASSIGN_OR_RETURN(token, Authenticate(member));
    MutexLock lock(&mutex_);
    token_ = token;
  }
  context.AddMetadata("token", token);
  return absl::OkStatus();
}

absl::StatusOr<std::string> EtcdClient::Authenticate(Member& member) {
  HW_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(options_.password_file));
  rpc::AuthenticateRequest request;
  request.set_name(options_.user);
  request.set_password(std::string(absl::StripSuffix(text, "\n")));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.timeout));
  rpc::AuthenticateResponse response;
  HW_RETURN_IF_ERROR(member.StatusOf(member.auth.Authenticate(&context, request, &response)));
  return response.token();
}

absl::StatusOr<std::optional<EtcdEntry>> EtcdClient::Get(const std::string& key) {
  rpc::RangeRequest request;
  request.set_key(key);
  rpc::RangeResponse response;
  HW_RETURN_IF_ERROR(Run([&](Member& member, grpc::ClientContext& context) {
    return member.kv.Range(&context, request, &response);
  }));
  if (response.kvs_size() == 0) return std::nullopt;
  return EntryOf(*response.mutable_kvs(0));
}

absl::StatusOr<EtcdClient::Listing> EtcdClient::List(const std::string& prefix) {
  Listing listing;
  rpc::RangeRequest request;
  request.set_key(prefix);
  request.set_range_end(EndOfPrefix(prefix));
  request.set_limit(kPageEntries);
  while (true) {
    rpc::RangeResponse response;
    HW_RETURN_IF_ERROR(Run([&](Member& member, grpc::ClientContext& context) {
      return member.kv.Range(&context, request, &response);
    }));
    if (listing.revision == 0) listing.revision = response.header().revision();
    request.set_revision(listing.revision);
    for (rpc::KeyValue& kv : *response.mutable_kvs()) listing.entries.push_back(EntryOf(kv));
    if (!response.more() || listing.entries.empty()) return listing;
    request.set_key(listing.entries.back().key + '\0');
  }
}

absl::StatusOr<std::optional<int64_t>> EtcdClient::Commit(
    const std::vector<EtcdCondition>& conditions, const std::vector<EtcdWrite>& writes) {
  rpc::TxnRequest request;
  for (const EtcdCondition& condition : conditions) {
    rpc::Compare& compare = *request.add_compare();
    compare.set_result(rpc::Compare::EQUAL);
    compare.set_target(rpc::Compare::MOD);
    compare.set_key(condition.key);
    compare.set_mod_revision(condition.revision);
  }
  for (const EtcdWrite& write : writes) {
    rpc::RequestOp& op = *request.add_success();
    if (!write.value.has_value()) {
      op.mutable_request_delete_range()->set_key(write.key);
      continue;
    }
    rpc::PutRequest& put = *op.mutable_request_put();
    put.set_key(write.key);
    put.set_value(*write.value);
    put.set_lease(write.lease);
  }
  rpc::TxnResponse response;
  HW_RETURN_IF_ERROR(Run([&](Member& member, grpc::ClientContext& context) {
    return member.kv.Txn(&context, request, &response);
  }));
  if (!response.succeeded()) return std::nullopt;
  return response.header().revision();
}

absl::StatusOr<int64_t> EtcdClient::Grant(absl::Duration ttl) {
  rpc::LeaseGrantRequest request;
  request.set_ttl(std::max<int64_t>(1, std::llround(std::ceil(absl::ToDoubleSeconds(ttl)))));
  rpc::LeaseGrantResponse response;
  HW_RETURN_IF_ERROR(Run([&](Member& member, grpc::ClientContext& context) {
    return member.lease.LeaseGrant(&context, request, &response);
  }));
  if (!response.error().empty()) return absl::InternalError(response.error());
  return response.id();
}

absl::Status EtcdClient::Renew(int64_t lease) {
  rpc::LeaseKeepAliveRequest request;
  request.set_id(lease);
  rpc::LeaseKeepAliveResponse response;
  HW_RETURN_IF_ERROR(Run([&](Member& member, grpc::ClientContext& context) {
    const auto stream = member.lease.LeaseKeepAlive(&context);
    const bool answered = stream->Write(request) && stream->Read(&response);
    stream->WritesDone();
    // What a stream says that was ended by its client after its answer does not matter.
    if (answered) context.TryCancel();
    const grpc::Status status = stream->Finish();
    if (answered) return grpc::Status::OK;
    if (!status.ok()) return status;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the stream ended without an answer");
  }));
  if (response.ttl() > 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("etcd: lease ", lease, " has ended"));
}

absl::Status EtcdClient::Revoke(int64_t lease) {
  rpc::LeaseRevokeRequest request;
  request.set_id(lease);
  rpc::LeaseRevokeResponse response;
  const absl::Status status = Run([&](Member& member, grpc::ClientContext& context) {
    return member.lease.LeaseRevoke(&context, request, &response);
  });
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::unique_ptr<EtcdWatch>> EtcdClient::Watch(const std::string& prefix,
                                                             int64_t revision) {
  size_t index = 0;
  {
    MutexLock lock(&mutex_);
    index = current_;
  }
  Member& member = *members_[index];
  auto context = std::make_unique<grpc::ClientContext>();
  HW_RETURN_IF_ERROR(AddToken(member, *context));
  rpc::WatchCreateRequest request;
  request.set_key(prefix);
  request.set_range_end(EndOfPrefix(prefix));
  request.set_start_revision(revision);
  return std::make_unique<EtcdWatch>(member.watch, std::move(context), request);
}

}  // namespace heavywater
