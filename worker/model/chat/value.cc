#include "worker/model/chat/value.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

std::vector<ChatValue> CharactersOf(std::string_view text) {
  std::vector<ChatValue> characters;
  while (!text.empty()) {
    const auto bytes = static_cast<size_t>(std::max(1, DecodeUtf8(text).bytes));
    characters.emplace_back(std::string(text.substr(0, bytes)));
    text.remove_prefix(bytes);
  }
  return characters;
}

const std::string& TextOf(const ChatValue& value) { return value.get_ref<const std::string&>(); }

// Where a slice's limit lies, as Python clamps it.
int64_t Clamp(int64_t at, int64_t length, int64_t low, int64_t high) {
  return std::clamp(at < 0 ? at + length : at, low, high);
}

absl::StatusOr<int64_t> LimitOf(const ChatValue& value, int64_t otherwise) {
  if (IsUndefined(value) || value.is_null()) return otherwise;
  if (value.is_number_integer()) return value.get<int64_t>();
  return absl::InvalidArgumentError(absl::StrCat("a slice by ", std::string(KindOf(value))));
}

}  // namespace

std::string_view KindOf(const ChatValue& value) {
  if (IsUndefined(value)) return "what is undefined";
  if (value.is_null()) return "none";
  if (value.is_string()) return "a text";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return value.is_boolean() ? "a bool" : "a number";
}

bool IsTrue(const ChatValue& value) {
  if (IsUndefined(value) || value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !TextOf(value).empty();
  return !value.empty();
}

absl::StatusOr<std::string> ToText(const ChatValue& value) {
  if (IsUndefined(value)) return std::string();
  if (value.is_string()) return TextOf(value);
  if (value.is_boolean()) return std::string(value.get<bool>() ? "True" : "False");
  if (value.is_null()) return std::string("None");
  if (value.is_number_integer()) return absl::StrCat(value.get<int64_t>());
  return absl::UnimplementedError(absl::StrCat("writing ", std::string(KindOf(value)), " as text"));
}

bool AreEqual(const ChatValue& a, const ChatValue& b) {
  if (IsUndefined(a) || IsUndefined(b)) return IsUndefined(a) && IsUndefined(b);
  const auto number = [](const ChatValue& value) {
    return value.is_number() || value.is_boolean();
  };
  if (number(a) && number(b)) {
    const auto of = [](const ChatValue& value) {
      return value.is_boolean() ? static_cast<double>(value.get<bool>()) : value.get<double>();
    };
    return of(a) == of(b);
  }
  return a == b;
}

absl::StatusOr<bool> IsLess(const ChatValue& a, const ChatValue& b) {
  if (a.is_number() && b.is_number()) return a.get<double>() < b.get<double>();
  // The order of UTF-8's bytes is that of the characters.
  if (a.is_string() && b.is_string()) return TextOf(a) < TextOf(b);
  return absl::InvalidArgumentError(
      absl::StrCat("comparing ", std::string(KindOf(a)), " with ", std::string(KindOf(b))));
}

absl::StatusOr<bool> IsIn(const ChatValue& item, const ChatValue& container) {
  if (container.is_string() && item.is_string()) {
    return TextOf(container).find(TextOf(item)) != std::string::npos;
  }
  if (container.is_object()) return item.is_string() && container.contains(TextOf(item));
  if (container.is_array()) {
    return std::ranges::any_of(container,
                               [&](const ChatValue& one) { return AreEqual(one, item); });
  }
  if (IsUndefined(container)) return false;
  return absl::InvalidArgumentError(absl::StrCat("looking for ", std::string(KindOf(item)), " in ",
                                                 std::string(KindOf(container))));
}

absl::StatusOr<int64_t> LengthOf(const ChatValue& value) {
  if (IsUndefined(value)) return 0;
  if (value.is_array() || value.is_object()) return static_cast<int64_t>(value.size());
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(value));
  return static_cast<int64_t>(items.size());
}

absl::StatusOr<std::vector<ChatValue>> ItemsOf(const ChatValue& value) {
  std::vector<ChatValue> items;
  if (value.is_string()) return CharactersOf(TextOf(value));
  if (value.is_array()) {
    items.assign(value.begin(), value.end());
    return items;
  }
  if (value.is_object()) {
    for (const auto& [key, unused] : value.items()) items.emplace_back(key);
    return items;
  }
  if (IsUndefined(value)) return items;
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(KindOf(value)), " where a list is wanted"));
}

absl::StatusOr<ChatValue> ElementOf(const ChatValue& container, const ChatValue& key) {
  if (IsUndefined(container)) {
    return absl::InvalidArgumentError(
        absl::StrCat("an element of what is undefined: ", ToText(key).value_or("?")));
  }
  if (container.is_object()) {
    if (!key.is_string()) return Undefined();
    const auto found = container.find(TextOf(key));
    return found == container.end() ? Undefined() : *found;
  }
  if (!key.is_number_integer() || !(container.is_array() || container.is_string())) {
    return Undefined();
  }
  HW_ASSIGN_OR_RETURN(const int64_t length, LengthOf(container));
  int64_t index = key.get<int64_t>();
  if (index < 0) index += length;
  if (index < 0 || index >= length) return Undefined();
  if (container.is_array()) return container[index];
  return CharactersOf(TextOf(container))[index];
}

absl::StatusOr<ChatValue> SliceOf(const ChatValue& container, const ChatValue& begin,
                                  const ChatValue& end, const ChatValue& step) {
  if (!container.is_array() && !container.is_string()) {
    return absl::InvalidArgumentError(absl::StrCat("a slice of ", std::string(KindOf(container))));
  }
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(container));
  const auto length = static_cast<int64_t>(items.size());
  HW_ASSIGN_OR_RETURN(const int64_t by, LimitOf(step, 1));
  if (by != 1 && by != -1) {
    return absl::UnimplementedError(absl::StrCat("a slice by steps of ", by));
  }
  const int64_t low = by > 0 ? 0 : -1;
  const int64_t high = by > 0 ? length : length - 1;
  HW_ASSIGN_OR_RETURN(const int64_t first, LimitOf(begin, by > 0 ? 0 : length - 1));
  // A left out end of a step back lies before the first: not at what -1 means.
  HW_ASSIGN_OR_RETURN(const int64_t last, LimitOf(end, by > 0 ? length : -1 - length));
  const int64_t stop = Clamp(last, length, low, high);
  std::vector<ChatValue> chosen;
  for (int64_t i = Clamp(first, length, low, high); by > 0 ? i < stop : i > stop; i += by) {
    chosen.push_back(items[i]);
  }
  if (container.is_array()) return ChatValue(chosen);
  std::string text;
  for (const ChatValue& character : chosen) text += TextOf(character);
  return ChatValue(text);
}

}  // namespace heavywater
