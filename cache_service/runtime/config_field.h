// One scalar field of a configuration message, to and from text.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class FieldDescriptor;
class Message;
}  // namespace google::protobuf

namespace heavywater {

// INVALID_ARGUMENT naming the field, what came and what was wanted.
absl::Status SetConfigField(const google::protobuf::FieldDescriptor& field, const std::string& text,
                            google::protobuf::Message* config);

// The field's value; strings without quotes.
std::string ConfigFieldText(const google::protobuf::FieldDescriptor& field,
                            const google::protobuf::Message& config);

// For messages to people: "an integer (64 bits)", "true or false", ...
std::string ConfigFieldType(const google::protobuf::FieldDescriptor& field);

}  // namespace heavywater
