// A chat template (Jinja), cut into texts and the tokens of its tags.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

struct ChatToken {
  enum Kind {
    kText,             // outside of tags
    kStatementBegin,   // {%
    kExpressionBegin,  // {{
    kTagEnd,           // %} or }}
    kName,
    kString,  // unescaped
    kNumber,
    kOperator,
    kEnd,  // of the template; the last one
  };
  Kind kind = kEnd;
  std::string text = "";
  size_t offset = 0;  // in the template, for messages
};

// With Jinja's trim_blocks and lstrip_blocks, as everybody renders chat templates. Comments
// are gone. INVALID_ARGUMENT with the offset.
absl::StatusOr<std::vector<ChatToken>> LexChatTemplate(std::string_view source);

}  // namespace heavywater
