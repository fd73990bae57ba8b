#include "cache_service/security/certificates.h"

#include <grpcpp/security/tls_certificate_provider.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/security/small_file.h"

namespace heavywater {
namespace {

// How soon gRPC sees a new copy.
constexpr unsigned int kCopySeconds = 1;

absl::StatusOr<std::string> ReadIfNamed(const std::string& path) {
  return path.empty() ? absl::StatusOr<std::string>("") : ReadSmallFile(path);
}

absl::StatusOr<PemMaterial> Read(const CertificateFiles& files) {
  PemMaterial material;
  HW_ASSIGN_OR_RETURN(material.certificates, ReadIfNamed(files.certificates));
  HW_ASSIGN_OR_RETURN(material.key, ReadIfNamed(files.key));
  HW_ASSIGN_OR_RETURN(material.roots, ReadIfNamed(files.roots));
  return material;
}

absl::Status Annotate(const absl::Status& status, const CertificateFiles& files) {
  std::string names;
  for (const std::string& name : {files.certificates, files.key, files.roots}) {
    if (!name.empty()) absl::StrAppend(&names, names.empty() ? "" : ", ", name);
  }
  return absl::Status(status.code(), absl::StrCat(names, ": ", status.message()));
}

std::string IdentityOf(const PemMaterial& material) {
  return absl::StrCat(material.key, "\n", material.certificates);
}

// Puts new contents where gRPC reads them, if they differ.
absl::Status Store(const std::string& contents, std::unique_ptr<MemoryFile>& file) {
  if (file != nullptr) return file->Replace(contents);
  HW_ASSIGN_OR_RETURN(MemoryFile made, MemoryFile::Create(contents));
  file = std::make_unique<MemoryFile>(std::move(made));
  return absl::OkStatus();
}

// One that is being rewritten, or did not fit its disk, says nothing about who is trusted.
absl::Status CheckNotEmpty(const char* what, const std::string& path, const std::string& contents) {
  if (path.empty() || !contents.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is empty"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Certificates>> Certificates::Create(const CertificateFiles& files,
                                                                   absl::Duration interval,
                                                                   OnReload on_reload) {
  std::unique_ptr<Certificates> made(new Certificates(files, std::move(on_reload)));
  HW_ASSIGN_OR_RETURN(made->seen_, Read(files));
  if (const absl::Status loaded = made->Load(); !loaded.ok()) return Annotate(loaded, files);
  const std::string identity = made->identity_ == nullptr ? "" : made->identity_->path();
  const std::string roots = made->roots_ == nullptr ? "" : made->roots_->path();
  made->provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      identity, identity, roots, kCopySeconds);
  made->watch_ = std::make_unique<Periodic>(
      interval, [certificates = made.get()] { certificates->Refresh(); });
  return made;
}

Certificates::Certificates(CertificateFiles files, OnReload on_reload)
    : files_(std::move(files)), on_reload_(std::move(on_reload)) {}

absl::Time Certificates::end() const {
  MutexLock lock(&mutex_);
  return end_;
}

absl::Status Certificates::Load() {
  HW_RETURN_IF_ERROR(
      CheckNotEmpty("the certificate's file", files_.certificates, seen_.certificates));
  HW_RETURN_IF_ERROR(CheckNotEmpty("the key's file", files_.key, seen_.key));
  HW_RETURN_IF_ERROR(CheckNotEmpty("the file of trusted certificates", files_.roots, seen_.roots));
  HW_ASSIGN_OR_RETURN(const absl::Time end, CheckPem(seen_, absl::Now()));
  if (!files_.key.empty()) HW_RETURN_IF_ERROR(Store(IdentityOf(seen_), identity_));
  if (!files_.roots.empty()) HW_RETURN_IF_ERROR(Store(seen_.roots, roots_));
  MutexLock lock(&mutex_);
  end_ = end;
  return absl::OkStatus();
}

void Certificates::Refresh() {
  absl::StatusOr<PemMaterial> read = Read(files_);
  if (!read.ok()) {
    // Told once, not every time.
    if (read.status() != unreadable_) on_reload_(read.status());
    unreadable_ = read.status();
    return;
  }
  unreadable_ = absl::OkStatus();
  if (*read == seen_) return;
  PemMaterial before = std::exchange(seen_, *std::move(read));
  const absl::Status loaded = Load();
  // What is not the files' own fault may work the next time.
  if (!loaded.ok() && !absl::IsInvalidArgument(loaded)) seen_ = std::move(before);
  on_reload_(loaded.ok() ? loaded : Annotate(loaded, files_));
}

}  // namespace heavywater
