// What the expressions of a chat template work on: JSON, with Python's ways.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

// Integers are int64_t. A name that is not known is Undefined().
using ChatValue = nlohmann::ordered_json;

inline ChatValue Undefined() { return ChatValue(ChatValue::value_t::discarded); }
inline bool IsUndefined(const ChatValue& value) { return value.is_discarded(); }

bool IsTrue(const ChatValue& value);

// As Python's str() writes it. UNIMPLEMENTED for what is no text, number, bool or None.
absl::StatusOr<std::string> ToText(const ChatValue& value);

// As Python's ==: numbers of both kinds are equal where their values are.
bool AreEqual(const ChatValue& a, const ChatValue& b);

// Python's <. INVALID_ARGUMENT unless both are numbers or both texts.
absl::StatusOr<bool> IsLess(const ChatValue& a, const ChatValue& b);

// Python's `item in container`. INVALID_ARGUMENT for what contains nothing.
absl::StatusOr<bool> IsIn(const ChatValue& item, const ChatValue& container);

// Of a text in characters; INVALID_ARGUMENT for what has none.
absl::StatusOr<int64_t> LengthOf(const ChatValue& value);

// The elements of a list, the characters of a text, the keys of an object.
absl::StatusOr<std::vector<ChatValue>> ItemsOf(const ChatValue& value);

// container[key], container.name: undefined where there is none. INVALID_ARGUMENT for a
// container that is undefined itself.
absl::StatusOr<ChatValue> ElementOf(const ChatValue& container, const ChatValue& key);

// container[begin:end:step] of a list or a text; undefined: left out.
absl::StatusOr<ChatValue> SliceOf(const ChatValue& container, const ChatValue& begin,
                                  const ChatValue& end, const ChatValue& step);

// For messages: "text", "list", ...
std::string_view KindOf(const ChatValue& value);

}  // namespace heavywater
