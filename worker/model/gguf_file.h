// A GGUF file, mapped and checked: typed access to metadata and tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_parser.h"
#include "worker/model/gguf_types.h"
#include "worker/model/mapped_file.h"
#include "worker/model/model_file.h"

namespace heavywater {

// Immutable and thread safe. Everything it returns is a view that lives as long
// as it does.
class GgufFile final : public ModelFile {
 public:
  // NOT_FOUND or PERMISSION_DENIED from the system; else as ParseGguf(), with
  // the path before the message.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);

  bool Has(std::string_view field) const { return contents_.metadata.contains(field); }

  // NOT_FOUND when the field is missing, INVALID_ARGUMENT when it has another
  // type; both name it. Any integer type will do where the value fits.
  absl::StatusOr<std::string_view> GetString(std::string_view field) const;
  absl::StatusOr<int64_t> GetInteger(std::string_view field) const;
  absl::StatusOr<double> GetFloat(std::string_view field) const;
  absl::StatusOr<bool> GetBool(std::string_view field) const;
  absl::StatusOr<std::span<const std::string_view>> GetStrings(std::string_view field) const;
  absl::StatusOr<std::vector<int32_t>> GetInt32s(std::string_view field) const;
  absl::StatusOr<std::vector<float>> GetFloats(std::string_view field) const;

  // ReadModelConfig(), ReadTokenizerSpec(), ModelFingerprint().
  absl::StatusOr<ModelConfig> ReadConfig() const override;
  absl::StatusOr<TokenizerSpec> ReadTokenizer() const override;
  std::string Fingerprint() const override;

  const GgufTensor* FindTensor(std::string_view name) const override;
  std::string StoredName(std::string_view name) const override { return std::string(name); }
  std::vector<std::string_view> TensorNames() const override;

  int64_t file_bytes() const { return static_cast<int64_t>(file_.bytes().size()); }
  // Metadata and tensor table, as stored.
  std::span<const std::byte> header() const {
    return file_.bytes().first(static_cast<size_t>(contents_.header_bytes));
  }

 private:
  explicit GgufFile(MappedFile file) : file_(std::move(file)) {}
  absl::StatusOr<const GgufValue*> GetValue(std::string_view field) const;
  template <typename T>
  absl::StatusOr<std::vector<T>> GetNumbers(std::string_view field, GgufType type) const;

  MappedFile file_;
  GgufContents contents_;
};

}  // namespace heavywater
