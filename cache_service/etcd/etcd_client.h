// Calls to an etcd (API version 3): keys, transactions, leases, watches.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "cache_service/etcd/etcd_watch.h"
#include "cache_service/security/channels.h"

namespace grpc {
class ClientContext;
class Status;
}  // namespace grpc

namespace heavywater {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // HOST:PORT of the members
  // Where etcd asks for users; the file holds the password and may change.
  std::string user = {};
  std::string password_file = {};
  bool allow_plaintext = false;  // of the password, to where others can listen
  // TLS, as for every other client of the project; ca_file empty: plaintext.
  ChannelSecurity security = {};
  absl::Duration timeout = absl::Seconds(2);  // of one call at one member
};

// What must hold for Commit() to write: `revision` of the key's last change; 0: there is
// no such key.
struct EtcdCondition {
  std::string key;
  int64_t revision = 0;
};

// With a lease the key goes when the lease ends.
struct EtcdWrite {
  std::string key;
  std::optional<std::string> value;  // none: the key is deleted
  int64_t lease = 0;
};

// Thread safe. A member that cannot be reached is asked no more once another has answered;
// each call tries each member once. UNAVAILABLE: none answers; a write may then have been
// taken all the same, or be taken later.
class EtcdClient {
 public:
  // INVALID_ARGUMENT naming what is wrong; nobody is called yet.
  static absl::StatusOr<std::unique_ptr<EtcdClient>> Create(const EtcdOptions& options);
  ~EtcdClient();

  // Null: there is no such key. Linearizable: what was committed before is seen.
  absl::StatusOr<std::optional<EtcdEntry>> Get(const std::string& key);
  // All keys that begin with the prefix, ascending, as of one revision.
  struct Listing {
    std::vector<EtcdEntry> entries;
    int64_t revision = 0;
  };
  absl::StatusOr<Listing> List(const std::string& prefix);

  // Writes all if all conditions hold: the new revision. Null: they do not. NOT_FOUND: a
  // lease that has ended.
  absl::StatusOr<std::optional<int64_t>> Commit(const std::vector<EtcdCondition>& conditions,
                                                const std::vector<EtcdWrite>& writes);

  // A lease that ends unless it is renewed; at least a second.
  absl::StatusOr<int64_t> Grant(absl::Duration ttl);
  // NOT_FOUND: it has ended.
  absl::Status Renew(int64_t lease);
  // Ends it, and its keys with it.
  absl::Status Revoke(int64_t lease);

  // Changes of keys that begin with the prefix, from `revision` on. The client must outlive it.
  absl::StatusOr<std::unique_ptr<EtcdWatch>> Watch(const std::string& prefix, int64_t revision);

 private:
  struct Member;
  EtcdClient(const EtcdOptions& options, std::unique_ptr<Channels> channels,
             std::vector<std::unique_ptr<Member>> members);

  using Call = std::function<grpc::Status(Member&, grpc::ClientContext&)>;
  absl::Status Run(const Call& call);
  absl::Status RunAt(Member& member, const Call& call);
  // Null: nobody is to be named. UNAUTHENTICATED or what the member says.
  absl::Status AddToken(Member& member, grpc::ClientContext& context);
  absl::StatusOr<std::string> Authenticate(Member& member);

  const EtcdOptions options_;
  const std::unique_ptr<Channels> channels_;
  const std::vector<std::unique_ptr<Member>> members_;
  Mutex mutex_;
  size_t current_ ABSL_GUARDED_BY(mutex_) = 0;  // of members_: the last that answered
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

// The first key after all that begin with the prefix.
std::string EndOfPrefix(std::string prefix);

}  // namespace heavywater
