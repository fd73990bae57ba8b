// The certificates of one process, read again while it runs.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "cache_service/security/memory_file.h"
#include "cache_service/security/pem.h"
#include "cache_service/security/periodic.h"

namespace grpc::experimental {
class CertificateProviderInterface;
}

namespace heavywater {

// Paths; what is empty is not there.
struct CertificateFiles {
  std::string certificates = {};
  std::string key = {};
  std::string roots = {};
};

// How the new contents of a file were taken: for logs and metrics.
using OnReload = std::function<void(const absl::Status& result)>;

// Looks into the files from time to time. New contents are used for connections from
// then on if CheckPem() takes them; else the old ones stay in use. Thread safe.
//
// gRPC can watch files by itself (FileWatcherCertificateProvider), but a broken one leaves
// it with none. So it watches copies, in memory, of what was found good.
class Certificates {
 public:
  // `on_reload` is called on a thread of its own, once for each change. INVALID_ARGUMENT
  // naming the file that cannot be read or is no good.
  static absl::StatusOr<std::unique_ptr<Certificates>> Create(const CertificateFiles& files,
                                                              absl::Duration interval,
                                                              OnReload on_reload);

  // For gRPC's credentials; follows the files for as long as this object lives.
  const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider() const {
    return provider_;
  }
  const CertificateFiles& files() const { return files_; }
  // Until when what is in use can be used.
  absl::Time end() const;

 private:
  Certificates(CertificateFiles files, OnReload on_reload);
  absl::Status Load();
  void Refresh();

  const CertificateFiles files_;
  const OnReload on_reload_;
  // Key and certificates in one, so that no reader gets one of the old and one of the new.
  std::unique_ptr<MemoryFile> identity_;
  std::unique_ptr<MemoryFile> roots_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
  absl::Status unreadable_;  // as of the last look
  PemMaterial seen_;         // likewise, good or not
  mutable Mutex mutex_;
  absl::Time end_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::unique_ptr<Periodic> watch_;  // last: uses the others
};

}  // namespace heavywater
