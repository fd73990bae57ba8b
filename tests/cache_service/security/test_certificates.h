// Certificates of a test's own.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace heavywater {

// A certificate and its key, as PEM.
struct TestIdentity {
  std::string certificate;
  std::string key;
};

// Signs certificates for 127.0.0.1, ::1, localhost and one more name.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name = "test authority");
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  const std::string& certificate() const { return certificate_; }  // PEM
  TestIdentity Sign(const std::string& name, absl::Duration valid_for = absl::Hours(1));

 private:
  X509* root_ = nullptr;
  EVP_PKEY* key_ = nullptr;
  std::string certificate_;
  long serial_ = 1;
};

// A folder that is gone at the end.
class TestFolder {
 public:
  TestFolder();
  ~TestFolder();
  // Writes it in one step; its path.
  std::string Write(const std::string& name, const std::string& contents) const;
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

 private:
  std::filesystem::path folder_;
};

}  // namespace heavywater
