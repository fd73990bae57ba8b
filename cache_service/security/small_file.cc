#include "cache_service/security/small_file.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace heavywater {

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{1} << 20;
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot open ", path));
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::InvalidArgumentError(absl::StrCat("cannot read ", path));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() <= kMaxBytes) return text;
  return absl::InvalidArgumentError(
      absl::StrCat(path, " is larger than ", kMaxBytes, " bytes, want a small file"));
}

}  // namespace heavywater
