#include "cache_service/runtime/config_field.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace heavywater {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

absl::Status WrongType(const FieldDescriptor& field, const std::string& text) {
  return absl::InvalidArgumentError(
      absl::StrCat(field.name(), " is \"", text, "\", want ", ConfigFieldType(field)));
}

bool ParseBool(const std::string& text, bool* value) {
  *value = text == "true";
  return *value || text == "false";
}

}  // namespace

absl::Status SetConfigField(const FieldDescriptor& field, const std::string& text,
                            Message* config) {
  if (field.is_repeated()) return WrongType(field, text);
  const google::protobuf::Reflection& reflection = *config->GetReflection();
  int32_t int32 = 0;
  int64_t int64 = 0;
  double real = 0;
  bool flag = false;
  switch (field.type()) {
    case FieldDescriptor::TYPE_STRING:
      reflection.SetString(config, &field, text);
      return absl::OkStatus();
    case FieldDescriptor::TYPE_INT32:
      if (!absl::SimpleAtoi(text, &int32)) return WrongType(field, text);
      reflection.SetInt32(config, &field, int32);
      return absl::OkStatus();
    case FieldDescriptor::TYPE_INT64:
      if (!absl::SimpleAtoi(text, &int64)) return WrongType(field, text);
      reflection.SetInt64(config, &field, int64);
      return absl::OkStatus();
    case FieldDescriptor::TYPE_DOUBLE:
      if (!absl::SimpleAtod(text, &real) || !std::isfinite(real)) return WrongType(field, text);
      reflection.SetDouble(config, &field, real);
      return absl::OkStatus();
    case FieldDescriptor::TYPE_BOOL:
      if (!ParseBool(text, &flag)) return WrongType(field, text);
      reflection.SetBool(config, &field, flag);
      return absl::OkStatus();
    default:
      return WrongType(field, text);
  }
}

std::string ConfigFieldText(const FieldDescriptor& field, const Message& config) {
  const google::protobuf::Reflection& reflection = *config.GetReflection();
  switch (field.type()) {
    case FieldDescriptor::TYPE_STRING:
      return reflection.GetString(config, &field);
    case FieldDescriptor::TYPE_INT32:
      return absl::StrCat(reflection.GetInt32(config, &field));
    case FieldDescriptor::TYPE_INT64:
      return absl::StrCat(reflection.GetInt64(config, &field));
    case FieldDescriptor::TYPE_DOUBLE:
      return absl::StrCat(reflection.GetDouble(config, &field));
    case FieldDescriptor::TYPE_BOOL:
      return reflection.GetBool(config, &field) ? "true" : "false";
    default:
      return "";
  }
}

std::string ConfigFieldType(const FieldDescriptor& field) {
  switch (field.is_repeated() ? FieldDescriptor::TYPE_GROUP : field.type()) {
    case FieldDescriptor::TYPE_STRING:
      return "a string";
    case FieldDescriptor::TYPE_INT32:
      return "an integer of 32 bits";
    case FieldDescriptor::TYPE_INT64:
      return "an integer of 64 bits";
    case FieldDescriptor::TYPE_DOUBLE:
      return "a finite number";
    case FieldDescriptor::TYPE_BOOL:
      return "true or false";
    default:
      return "a type that configuration files cannot hold";
  }
}

}  // namespace heavywater
