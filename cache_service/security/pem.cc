#include "cache_service/security/pem.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

template <auto* free_function>
struct Freed {
  template <typename T>
  void operator()(T* value) const {
    free_function(value);
  }
};
using Bio = std::unique_ptr<BIO, Freed<&BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Freed<&X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<&EVP_PKEY_free>>;

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// An encrypted key is refused: nobody is there to be asked.
int NoPassword(char*, int, int, void*) { return -1; }

absl::StatusOr<std::vector<Certificate>> ReadCertificates(const std::string& pem,
                                                          const char* what) {
  const Bio bio = Open(pem);
  std::vector<Certificate> certificates;
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)) {
    certificates.emplace_back(certificate);
  }
  // At the end of the text that is no error.
  const bool whole = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (whole && !certificates.empty()) return certificates;
  return absl::InvalidArgumentError(
      absl::StrCat(what, certificates.empty() ? " has no certificate" : " has a broken certificate",
                   ", want PEM (-----BEGIN CERTIFICATE-----)"));
}

absl::StatusOr<absl::Time> TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError(
        "the certificate does not say from and until when it is valid");
  }
  return absl::FromTM(parts, absl::UTCTimeZone());
}

}  // namespace

absl::StatusOr<absl::Time> CheckPem(const PemMaterial& material, absl::Time now) {
  if (!material.roots.empty()) {
    HW_RETURN_IF_ERROR(
        ReadCertificates(material.roots, "the file of trusted certificates").status());
  }
  absl::Time end = absl::InfiniteFuture();
  if (material.certificates.empty() && material.key.empty()) return end;
  HW_ASSIGN_OR_RETURN(const auto chain,
                      ReadCertificates(material.certificates, "the certificate's file"));
  const Bio bio = Open(material.key);
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        "the key's file has no private key, want PEM without a password");
  }
  const bool fits = X509_check_private_key(chain.front().get(), key.get()) == 1;
  ERR_clear_error();
  if (!fits) return absl::InvalidArgumentError("the key is not that of the certificate");
  for (const Certificate& certificate : chain) {
    HW_ASSIGN_OR_RETURN(const absl::Time its_end, TimeOf(X509_get0_notAfter(certificate.get())));
    end = std::min(end, its_end);
  }
  HW_ASSIGN_OR_RETURN(const absl::Time begin, TimeOf(X509_get0_notBefore(chain.front().get())));
  if (begin > now) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the certificate is valid from ", absl::FormatTime(begin, absl::UTCTimeZone()), " on"));
  }
  if (end > now) return end;
  return absl::InvalidArgumentError(
      absl::StrCat("the certificate was valid until ", absl::FormatTime(end, absl::UTCTimeZone())));
}

}  // namespace heavywater
