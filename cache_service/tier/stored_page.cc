#include "cache_service/tier/stored_page.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"

namespace heavywater {
namespace {

constexpr uint32_t kMagic = 0x47505748;  // "HWPG", little endian

struct Header {
  uint32_t magic;
  int32_t version;
  uint64_t fingerprint;
  uint32_t page_bytes;
  uint32_t crc32c;
};
static_assert(sizeof(Header) == kStoredHeaderBytes);

void AppendBigEndian(uint64_t value, int bytes, std::string& to) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    to.push_back(static_cast<char>(value >> shift & 0xff));
  }
}

absl::Status Damaged(const PageKey& key, absl::string_view what, int64_t got, int64_t want) {
  return absl::DataLossError(absl::StrCat(Describe(key), ": ", what, " is ", got, ", want ", want));
}

}  // namespace

std::string Describe(const PageKey& key) {
  return absl::StrCat("page ", key.page, " of sequence ", key.sequence, ", layer ", key.layer,
                      ", kv_head ", key.kv_head);
}

absl::Status CheckPageKey(const PageKey& key) {
  const auto check = [](const char* field, int64_t value, int64_t limit) {
    if (value >= 0 && value < limit) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is ", value, ", want 0 to ", limit - 1));
  };
  for (absl::Status status : {check("layer", key.layer, 1024), check("kv_head", key.kv_head, 1024),
                              check("page", key.page, int64_t{1} << 43)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string StoredKey(const PageKey& key) {
  std::string text;
  text.reserve(kStoredKeyBytes);
  AppendBigEndian(key.sequence, 8, text);
  AppendBigEndian(static_cast<uint64_t>(key.layer), 2, text);
  AppendBigEndian(static_cast<uint64_t>(key.kv_head), 2, text);
  AppendBigEndian(static_cast<uint64_t>(key.page), 8, text);
  AppendBigEndian(key.fingerprint, 8, text);
  return text;
}

StoredHeader MakeStoredHeader(const PageCopy& page) {
  const Header header = {kMagic, kStoredPageVersion, page.key.fingerprint,
                         static_cast<uint32_t>(page.bytes.size()), page.crc32c};
  StoredHeader bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

absl::StatusOr<uint32_t> TakeStoredPage(const PageKey& key, std::span<const std::byte> stored,
                                        std::span<std::byte> bytes) {
  const auto want = static_cast<int64_t>(bytes.size());
  const auto got = static_cast<int64_t>(stored.size());
  if (got != want + kStoredHeaderBytes) {
    return Damaged(key, "its stored size", got, want + kStoredHeaderBytes);
  }
  Header header;
  std::memcpy(&header, stored.data(), sizeof(header));
  if (header.magic != kMagic) return Damaged(key, "its magic number", header.magic, kMagic);
  if (header.version != kStoredPageVersion) {
    return Damaged(key, "its format version", header.version, kStoredPageVersion);
  }
  if (header.fingerprint != key.fingerprint) {
    return absl::DataLossError(absl::StrCat(Describe(key), ": its fingerprint is ",
                                            header.fingerprint, ", want ", key.fingerprint));
  }
  if (header.page_bytes != want) return Damaged(key, "page_bytes", header.page_bytes, want);
  // The copy is checked, so that what is returned is what was checked.
  const uint32_t crc =
      CopyWithCrc32c(stored.subspan(kStoredHeaderBytes, bytes.size()), bytes.data());
  if (crc != header.crc32c) return Damaged(key, "its checksum", crc, header.crc32c);
  return crc;
}

}  // namespace heavywater
