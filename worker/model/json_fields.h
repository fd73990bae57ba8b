// Fields of a JSON object that comes from a file, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// A view of an object. A wrong field is INVALID_ARGUMENT naming it, what was got and what
// was wanted; a missing one NOT_FOUND, unless a value is given for it. null is missing.
class JsonFields {
 public:
  // `where` precedes names in messages ("rope_scaling.").
  explicit JsonFields(const nlohmann::json& object, std::string where = "")
      : object_(object), where_(std::move(where)) {}

  std::string Name(std::string_view field) const { return where_ + std::string(field); }
  // Null when missing.
  const nlohmann::json* Find(std::string_view field) const;
  bool Has(std::string_view field) const { return Find(field) != nullptr; }

  // 1 to limit.
  absl::StatusOr<int> Size(std::string_view field, int64_t limit) const;
  absl::StatusOr<int> SizeOr(std::string_view field, int64_t limit, int otherwise) const;
  // Finite and above 0.
  absl::StatusOr<double> Positive(std::string_view field) const;
  absl::StatusOr<double> PositiveOr(std::string_view field, double otherwise) const;
  absl::StatusOr<bool> BoolOr(std::string_view field, bool otherwise) const;
  absl::StatusOr<std::string> Text(std::string_view field) const;
  absl::StatusOr<std::string> TextOr(std::string_view field, std::string_view otherwise) const;

 private:
  absl::Status Error(std::string_view field, std::string_view want) const;

  const nlohmann::json& object_;
  const std::string where_;
};

// Of tokenizer.json (250,000 tokens: 20 MB) and of files that only describe a model.
inline constexpr size_t kMaxJsonBytes = size_t{256} << 20;
inline constexpr size_t kMaxConfigBytes = size_t{16} << 20;

// A whole file's text; INVALID_ARGUMENT unless it is one JSON object,
// RESOURCE_EXHAUSTED for more bytes than the limit or more than 4 million values.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text,
                                               size_t max_bytes = kMaxJsonBytes);
// Errors of the system and of the above, each with the path.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path,
                                              size_t max_bytes = kMaxJsonBytes);

}  // namespace heavywater
