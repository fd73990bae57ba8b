#include "tests/cache_service/security/test_certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"

namespace heavywater {
namespace {

EVP_PKEY* NewKey() { return EVP_EC_gen("P-256"); }

std::string TextOf(BIO* bio) {
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio, &text);
  std::string result(text, static_cast<size_t>(size));
  BIO_free(bio);
  return result;
}

std::string PemOf(X509* certificate) {
  BIO* const bio = BIO_new(BIO_s_mem());
  HW_CHECK(PEM_write_bio_X509(bio, certificate) == 1);
  return TextOf(bio);
}

std::string PemOf(EVP_PKEY* key) {
  BIO* const bio = BIO_new(BIO_s_mem());
  HW_CHECK(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  return TextOf(bio);
}

void AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  HW_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(const std::string& name, long serial, EVP_PKEY* key,
                     absl::Duration valid_for) {
  X509* const certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -7200);
  X509_gmtime_adj(X509_getm_notAfter(certificate), absl::ToInt64Seconds(valid_for));
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return certificate;
}

}  // namespace

TestAuthority::TestAuthority(const std::string& name) : key_(NewKey()) {
  root_ = NewCertificate(name, serial_++, key_, absl::Hours(24));
  X509_set_issuer_name(root_, X509_get_subject_name(root_));
  AddExtension(root_, root_, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(root_, root_, NID_key_usage, "critical,keyCertSign,cRLSign");
  HW_CHECK(X509_sign(root_, key_, EVP_sha256()) > 0);
  certificate_ = PemOf(root_);
}

TestAuthority::~TestAuthority() {
  X509_free(root_);
  EVP_PKEY_free(key_);
}

TestIdentity TestAuthority::Sign(const std::string& name, absl::Duration valid_for) {
  EVP_PKEY* const key = NewKey();
  X509* const certificate = NewCertificate(name, serial_++, key, valid_for);
  X509_set_issuer_name(certificate, X509_get_subject_name(root_));
  AddExtension(certificate, root_, NID_subject_alt_name,
               absl::StrCat("IP:127.0.0.1,IP:::1,DNS:localhost,DNS:", name));
  HW_CHECK(X509_sign(certificate, key_, EVP_sha256()) > 0);
  TestIdentity identity = {PemOf(certificate), PemOf(key)};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return identity;
}

TestFolder::TestFolder() {
  static std::atomic<int> count = 0;
  folder_ = std::filesystem::temp_directory_path() /
            absl::StrCat("heavywater-security-test-", getpid(), "-", count++);
  std::filesystem::create_directories(folder_);
}

TestFolder::~TestFolder() { std::filesystem::remove_all(folder_); }

std::string TestFolder::Write(const std::string& name, const std::string& contents) const {
  const std::filesystem::path file = folder_ / name;
  const std::filesystem::path fresh = folder_ / absl::StrCat(name, ".new");
  std::ofstream(fresh, std::ios::binary) << contents;
  std::filesystem::rename(fresh, file);
  return file.string();
}

}  // namespace heavywater
