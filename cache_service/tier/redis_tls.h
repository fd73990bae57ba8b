// TLS on a connected socket to a Redis (Debian's hiredis has none).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct ssl_ctx_st;
struct ssl_st;

namespace heavywater {

// PEM files, as CacheConfig names them.
struct RedisTlsOptions {
  std::string ca_file = {};      // empty: no TLS
  std::string server_name = {};  // in its certificate; empty: the address's host
  std::string cert_file = {};    // the service's own; both or neither
  std::string key_file = {};
};

// Used by one thread at a time. The socket is blocking, with time-outs of its own, and stays
// its owner's.
class RedisTls {
 public:
  // INVALID_ARGUMENT naming a file that cannot be used.
  static absl::Status Check(const RedisTlsOptions& options);
  // The handshake. The files are read now, so that changed ones count. UNAVAILABLE: it failed,
  // or the certificate is not what was expected.
  static absl::StatusOr<std::unique_ptr<RedisTls>> Start(const RedisTlsOptions& options,
                                                         const std::string& host, int socket);
  ~RedisTls();
  RedisTls(const RedisTls&) = delete;
  RedisTls& operator=(const RedisTls&) = delete;

  absl::Status Write(std::span<const char> bytes);     // all of them
  absl::StatusOr<size_t> Read(std::span<char> bytes);  // one at least

 private:
  struct FreeContext {
    void operator()(ssl_ctx_st* context) const;
  };
  struct FreeSsl {
    void operator()(ssl_st* ssl) const;
  };
  using Context = std::unique_ptr<ssl_ctx_st, FreeContext>;
  static absl::StatusOr<Context> MakeContext(const RedisTlsOptions& options);

  RedisTls(Context context, ssl_st* ssl);

  const Context context_;
  const std::unique_ptr<ssl_st, FreeSsl> ssl_;
};

}  // namespace heavywater
