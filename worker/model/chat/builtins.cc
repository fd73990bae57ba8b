#include "worker/model/chat/builtins.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cache_service/base/status.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

const std::string& TextOf(const ChatValue& value) { return value.get_ref<const std::string&>(); }

absl::Status Unknown(std::string_view what, const std::string& name) {
  return absl::UnimplementedError(absl::StrCat(std::string(what), " '", name, "'"));
}

// What Python's str.isspace() says.
bool IsPythonSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

absl::StatusOr<std::vector<std::string>> CharactersOf(const ChatValue& text) {
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(text));
  std::vector<std::string> characters;
  for (const ChatValue& item : items) characters.push_back(TextOf(item));
  return characters;
}

// str.strip and its siblings: `which` are the characters that go; undefined: space.
absl::StatusOr<ChatValue> Strip(const ChatValue& text, const ChatValue& which, bool left,
                                bool right) {
  HW_ASSIGN_OR_RETURN(const std::vector<std::string> characters, CharactersOf(text));
  std::vector<std::string> chosen;
  if (which.is_string()) {
    HW_ASSIGN_OR_RETURN(chosen, CharactersOf(which));
  }
  const auto goes = [&](const std::string& character) {
    if (which.is_string()) return std::ranges::count(chosen, character) > 0;
    return IsPythonSpace(DecodeUtf8(character).code_point);
  };
  auto first = characters.begin();
  auto last = characters.end();
  while (left && first != last && goes(*first)) ++first;
  while (right && first != last && goes(*(last - 1))) --last;
  return ChatValue(absl::StrJoin(first, last, ""));
}

// Letters beyond ASCII have cases of their own: none of a template's words do.
absl::StatusOr<ChatValue> InCase(const ChatValue& value, const std::string& how) {
  HW_ASSIGN_OR_RETURN(std::string text, ToText(value));
  if (!std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; })) {
    return absl::UnimplementedError(absl::StrCat("'", how, "' of letters beyond ASCII"));
  }
  if (how == "upper") {
    absl::AsciiStrToUpper(&text);
  } else {
    absl::AsciiStrToLower(&text);
    const bool is_first_large = how == "capitalize" && !text.empty();
    if (is_first_large) text[0] = absl::ascii_toupper(static_cast<unsigned char>(text[0]));
  }
  return ChatValue(text);
}

absl::StatusOr<ChatValue> Join(const ChatValue& list, const ChatValue& separator) {
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(list));
  HW_ASSIGN_OR_RETURN(const std::string between, ToText(separator));
  std::vector<std::string> texts;
  for (const ChatValue& item : items) {
    HW_ASSIGN_OR_RETURN(std::string text, ToText(item));
    texts.push_back(std::move(text));
  }
  return ChatValue(absl::StrJoin(texts, between));
}

absl::StatusOr<ChatValue> Replace(const ChatValue& value, const ChatArguments& arguments) {
  HW_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  HW_ASSIGN_OR_RETURN(const std::string from, ToText(arguments.At(0)));
  HW_ASSIGN_OR_RETURN(const std::string to, ToText(arguments.At(1)));
  if (from.empty() || !IsUndefined(arguments.At(2))) {
    return absl::UnimplementedError("'replace' of nothing, or of some only");
  }
  return ChatValue(absl::StrReplaceAll(text, {{from, to}}));
}

ChatValue ItemPairs(const ChatValue& object) {
  ChatValue pairs = ChatValue::array();
  for (const auto& [key, value] : object.items()) pairs.push_back(ChatValue::array({key, value}));
  return pairs;
}

// selectattr(name), selectattr(name, test, argument), and its opposite.
absl::StatusOr<ChatValue> Select(const ChatValue& list, const ChatArguments& arguments,
                                 bool wanted) {
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(list));
  ChatValue chosen = ChatValue::array();
  for (const ChatValue& item : items) {
    HW_ASSIGN_OR_RETURN(const ChatValue field, ElementOf(item, arguments.At(0)));
    bool passes = IsTrue(field);
    if (arguments.At(1).is_string()) {
      HW_ASSIGN_OR_RETURN(
          passes, ApplyChatTest(TextOf(arguments.At(1)), field, {.values = {arguments.At(2)}}));
    }
    if (passes == wanted) chosen.push_back(item);
  }
  return chosen;
}

// One end of a list or text; undefined when it is empty.
absl::StatusOr<ChatValue> EndOf(const ChatValue& value, int64_t index) {
  return ElementOf(value.is_object() ? ItemPairs(value) : value, index);
}

absl::StatusOr<ChatValue> ToInteger(const ChatValue& value) {
  if (value.is_number()) return ChatValue(static_cast<int64_t>(value.get<double>()));
  return absl::UnimplementedError(absl::StrCat("'int' of ", std::string(KindOf(value))));
}

absl::StatusOr<ChatValue> Split(const ChatValue& text, const ChatArguments& arguments) {
  if (arguments.values.size() != 1 || !arguments.At(0).is_string() || arguments.At(0).empty() ||
      TextOf(arguments.At(0)).empty()) {
    return absl::UnimplementedError("'split' without a separator, or of some only");
  }
  const std::vector<std::string> parts = absl::StrSplit(TextOf(text), TextOf(arguments.At(0)));
  return ChatValue(parts);
}

}  // namespace

ChatValue ChatArguments::Named(std::string_view name) const {
  for (const auto& [keyword, value] : by_keyword) {
    if (keyword == name) return value;
  }
  return Undefined();
}

absl::StatusOr<ChatValue> ApplyChatFilter(const std::string& name, const ChatValue& value,
                                          const ChatArguments& arguments) {
  if (!arguments.by_keyword.empty()) return Unknown("filter with named arguments", name);
  if (name == "trim") {
    HW_ASSIGN_OR_RETURN(const std::string text, ToText(value));
    return Strip(text, arguments.At(0), true, true);
  }
  if (name == "length" || name == "count") {
    HW_ASSIGN_OR_RETURN(const int64_t length, LengthOf(value));
    return ChatValue(length);
  }
  if (name == "upper" || name == "lower" || name == "capitalize") return InCase(value, name);
  if (name == "default" || name == "d") {
    const bool replaces = IsUndefined(value) || (IsTrue(arguments.At(1)) && !IsTrue(value));
    return replaces ? arguments.At(0) : value;
  }
  if (name == "join") return Join(value, arguments.At(0));
  if (name == "first") return EndOf(value, 0);
  if (name == "last") return EndOf(value, -1);
  if (name == "replace") return Replace(value, arguments);
  if (name == "items") return ItemPairs(value);
  if (name == "selectattr") return Select(value, arguments, true);
  if (name == "rejectattr") return Select(value, arguments, false);
  if (name == "int") return ToInteger(value);
  if (name == "safe") return value;
  if (name == "string") {
    HW_ASSIGN_OR_RETURN(const std::string text, ToText(value));
    return ChatValue(text);
  }
  if (name == "list") {
    HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, ItemsOf(value));
    return ChatValue(items);
  }
  return Unknown("filter", name);
}

absl::StatusOr<bool> ApplyChatTest(const std::string& name, const ChatValue& value,
                                   const ChatArguments& arguments) {
  if (name == "defined") return !IsUndefined(value);
  if (name == "undefined") return IsUndefined(value);
  if (IsUndefined(value) && name != "none" && name != "equalto" && name != "eq") {
    // Jinja's undefined is an empty sequence.
    if (name == "iterable" || name == "sequence") return true;
  }
  if (name == "none") return value.is_null();
  if (name == "string") return value.is_string();
  if (name == "mapping") return value.is_object();
  if (name == "boolean") return value.is_boolean();
  if (name == "true") return value.is_boolean() && value.get<bool>();
  if (name == "false") return value.is_boolean() && !value.get<bool>();
  if (name == "integer") return value.is_number_integer();
  if (name == "number") return value.is_number() || value.is_boolean();
  if (name == "iterable" || name == "sequence") {
    return value.is_array() || value.is_object() || value.is_string();
  }
  if (name == "equalto" || name == "eq" || name == "sameas") {
    return AreEqual(value, arguments.At(0));
  }
  if (name == "ne") return !AreEqual(value, arguments.At(0));
  if (name == "in") return IsIn(value, arguments.At(0));
  if (name == "odd" || name == "even") {
    if (!value.is_number_integer()) {
      return absl::InvalidArgumentError(
          absl::StrCat("test '", name, "' of ", std::string(KindOf(value))));
    }
    return (value.get<int64_t>() % 2 != 0) == (name == "odd");
  }
  return Unknown("test", name);
}

absl::StatusOr<ChatValue> CallChatMethod(const std::string& name, const ChatValue& value,
                                         const ChatArguments& arguments) {
  if (!arguments.by_keyword.empty()) return Unknown("method with named arguments", name);
  if (value.is_string()) {
    if (name == "strip") return Strip(value, arguments.At(0), true, true);
    if (name == "lstrip") return Strip(value, arguments.At(0), true, false);
    if (name == "rstrip") return Strip(value, arguments.At(0), false, true);
    if (name == "split") return Split(value, arguments);
    if (name == "upper" || name == "lower" || name == "capitalize") return InCase(value, name);
    if (name == "replace") return Replace(value, arguments);
    if (name == "join") return Join(arguments.At(0), value);
    if (name == "startswith" || name == "endswith") {
      if (!arguments.At(0).is_string()) return Unknown("of what is no text, method", name);
      const std::string& part = TextOf(arguments.At(0));
      return ChatValue(name == "startswith" ? absl::StartsWith(TextOf(value), part)
                                            : absl::EndsWith(TextOf(value), part));
    }
  }
  if (value.is_object()) {
    if (name == "items") return ItemPairs(value);
    if (name == "keys") {
      HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> keys, ItemsOf(value));
      return ChatValue(keys);
    }
    if (name == "get") {
      HW_ASSIGN_OR_RETURN(const ChatValue element, ElementOf(value, arguments.At(0)));
      if (!IsUndefined(element)) return element;
      return arguments.values.size() > 1 ? arguments.At(1) : ChatValue(nullptr);
    }
  }
  if (IsUndefined(value)) {
    return absl::InvalidArgumentError(absl::StrCat("method '", name, "' of what is undefined"));
  }
  return Unknown(absl::StrCat("of ", std::string(KindOf(value)), ", method"), name);
}

}  // namespace heavywater
