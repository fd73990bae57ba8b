#include "cache_service/registry/layout.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/validate.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace heavywater {
namespace {

constexpr size_t kMaxShownBytes = 512;

absl::StatusOr<int> ElementBytes(const std::string& dtype) {
  if (dtype == "fp32") return 4;
  if (dtype == "bf16" || dtype == "fp16") return 2;
  return absl::InvalidArgumentError(
      absl::StrCat("fingerprint.dtype is \"", dtype, "\", want \"fp32\", \"bf16\" or \"fp16\""));
}

std::string FieldText(const v1::Fingerprint& fingerprint,
                      const google::protobuf::FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *fingerprint.GetReflection();
  if (field.type() == google::protobuf::FieldDescriptor::TYPE_STRING) {
    // Of a request, so of any length: a message must have room for both values.
    return absl::StrCat("\"", reflection.GetString(fingerprint, &field).substr(0, kMaxShownBytes),
                        "\"");
  }
  return absl::StrCat(reflection.GetInt32(fingerprint, &field));
}

}  // namespace

absl::StatusOr<PageGeometry> GeometryOf(const v1::Fingerprint& fingerprint) {
  HW_RETURN_IF_ERROR(CheckText("fingerprint.model", fingerprint.model(), 0, kMaxDigestBytes));
  HW_RETURN_IF_ERROR(CheckText("fingerprint.rope", fingerprint.rope(), 0, kMaxDigestBytes));
  HW_RETURN_IF_ERROR(CheckText("fingerprint.positions", fingerprint.positions(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("fingerprint.format_version", fingerprint.format_version(),
                              kPageFormatVersion, kPageFormatVersion));
  HW_RETURN_IF_ERROR(CheckInt("fingerprint.head_dim", fingerprint.head_dim(), 1, 4096));
  HW_ASSIGN_OR_RETURN(const int element_bytes, ElementBytes(fingerprint.dtype()));
  const PageGeometry geometry = {.num_layers = fingerprint.num_layers(),
                                 .num_kv_heads = fingerprint.num_kv_heads(),
                                 .page_tokens = fingerprint.page_tokens(),
                                 .row_bytes = 2 * fingerprint.head_dim() * element_bytes};
  const absl::Status valid = geometry.Validate();
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("fingerprint.", valid.message()));
  }
  return geometry;
}

FingerprintId FingerprintIdOf(const v1::Fingerprint& fingerprint) {
  const google::protobuf::Descriptor& type = *v1::Fingerprint::descriptor();
  const google::protobuf::Reflection& reflection = *fingerprint.GetReflection();
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&hash](const std::string& text) {
    for (const char byte : text) {
      hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
    }
  };
  for (int i = 0; i < type.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *type.field(i);
    const bool is_text = field.type() == google::protobuf::FieldDescriptor::TYPE_STRING;
    const std::string value = is_text ? reflection.GetString(fingerprint, &field)
                                      : absl::StrCat(reflection.GetInt32(fingerprint, &field));
    add(absl::StrCat(field.number(), ":", value.size(), ":", value));
  }
  return hash;
}

absl::Status CompareFingerprints(const v1::Fingerprint& a, const std::string& left,
                                 const v1::Fingerprint& b, const std::string& right) {
  const google::protobuf::Descriptor& type = *v1::Fingerprint::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const std::string value_a = FieldText(a, *type.field(i));
    const std::string value_b = FieldText(b, *type.field(i));
    if (value_a == value_b) continue;
    return absl::FailedPreconditionError(absl::StrCat("fingerprint.", type.field(i)->name(), ": ",
                                                      left, " ", value_a, ", ", right, " ",
                                                      value_b));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
