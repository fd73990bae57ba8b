// Filters, tests and methods that chat templates use.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/chat/value.h"

namespace heavywater {

struct ChatArguments {
  std::vector<ChatValue> values = {};                              // by place
  std::vector<std::pair<std::string, ChatValue>> by_keyword = {};  // by name

  // Undefined where it is not there.
  ChatValue At(size_t index) const { return index < values.size() ? values[index] : Undefined(); }
  ChatValue Named(std::string_view name) const;
};

// value | name(arguments). Each is UNIMPLEMENTED for a name that it does not know, and
// INVALID_ARGUMENT where Jinja raises an error.
absl::StatusOr<ChatValue> ApplyChatFilter(const std::string& name, const ChatValue& value,
                                          const ChatArguments& arguments);
// value is name(arguments).
absl::StatusOr<bool> ApplyChatTest(const std::string& name, const ChatValue& value,
                                   const ChatArguments& arguments);
// value.name(arguments).
absl::StatusOr<ChatValue> CallChatMethod(const std::string& name, const ChatValue& value,
                                         const ChatArguments& arguments);

}  // namespace heavywater
