// Who may call: bearer tokens, of which only hashes are known here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "cache_service/security/certificates.h"
#include "cache_service/security/periodic.h"

namespace heavywater {

// Longer ones are nobody's: what it costs to hash a token is bounded.
inline constexpr size_t kMaxTokenBytes = 512;

enum class Role { kClient, kWorker, kAdmin };
const char* RoleName(Role role);  // "client", "worker", "admin"

// Whom a token stands for.
struct Caller {
  Role role = Role::kClient;
  std::string tenant;  // empty: it may act for every tenant
  bool operator==(const Caller&) const = default;
};

// The SHA-256 of a token.
using TokenHash = std::array<uint8_t, 32>;
TokenHash HashToken(absl::string_view token);

// The token of "Bearer TOKEN"; empty where there is none.
absl::string_view BearerToken(absl::string_view authorization);

// Text of lines
//   SHA-256-of-the-token-in-hex ROLE TENANT
// where TENANT is "*" for every tenant (workers and admins must have it); lines that begin
// with # and empty ones are skipped. INVALID_ARGUMENT naming the line, never its contents.
absl::StatusOr<std::map<TokenHash, Caller>> ParseTokens(absl::string_view text);

// A file of tokens that is read again when it has changed; one that is broken changes
// nothing. Thread safe.
class Tokens {
 public:
  // As Certificates::Create().
  static absl::StatusOr<std::unique_ptr<Tokens>> Create(const std::string& path,
                                                        absl::Duration interval,
                                                        OnReload on_reload);

  // Null when nobody has this token. How long it takes does not tell how much of a
  // token was right: what is compared is its hash, and that in constant time.
  std::shared_ptr<const Caller> Find(absl::string_view token) const;
  int64_t size() const;

 private:
  using Table = std::map<uint64_t, std::pair<TokenHash, std::shared_ptr<const Caller>>>;

  Tokens(std::string path, OnReload on_reload);
  absl::Status Load(const std::string& text);
  void Refresh();

  const std::string path_;
  const OnReload on_reload_;
  absl::Status unreadable_;  // as of the last look
  std::string seen_;         // likewise
  mutable Mutex mutex_;
  // By the first 8 bytes of the hash.
  std::shared_ptr<const Table> table_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Periodic> watch_;  // last: uses the others
};

}  // namespace heavywater
