#include "worker/model/chat/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache_service/base/status.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

// The longer ones first.
constexpr std::array<std::string_view, 28> kOperators = {
    "==", "!=", "<=", ">=", "//", "**", "(", ")", "[", "]", "{", "}", ",", ":",
    ".",  "|",  "=",  "<",  ">",  "+",  "-", "*", "/", "%", "~", ";", "!", "&"};

bool IsSpace(char c) { return absl::ascii_isspace(static_cast<unsigned char>(c)); }
bool IsNameStart(char c) { return absl::ascii_isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool IsNamePart(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool IsDigit(char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  absl::StatusOr<std::vector<ChatToken>> Run() {
    while (at_ < source_.size()) {
      const size_t tag = FindTag();
      const std::string_view text = source_.substr(at_, tag - at_);
      if (tag == source_.size()) {
        AddText(text);
        break;
      }
      AddText(BeforeTag(text, tag));
      at_ = tag;
      HW_RETURN_IF_ERROR(source_[tag + 1] == '#' ? SkipComment() : LexTag());
    }
    Add(ChatToken::kEnd, "");
    return std::move(tokens_);
  }

 private:
  absl::Status Error(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("at byte ", at_, ": ", std::string(what)));
  }
  void Add(ChatToken::Kind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), at_});
  }
  void AddText(std::string_view text) {
    if (!text.empty()) Add(ChatToken::kText, std::string(text));
  }
  bool StartsWith(std::string_view what) const { return source_.substr(at_).starts_with(what); }

  size_t FindTag() const {
    for (size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] != '{') continue;
      if (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#') return i;
    }
    return source_.size();
  }

  // `{%-` takes the space before it; a statement or comment that is the first on its line
  // the line's indentation, unless it says `{%+`.
  std::string_view BeforeTag(std::string_view text, size_t tag) const {
    const char mark = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (mark == '-') {
      while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
      return text;
    }
    if (source_[tag + 1] == '{' || mark == '+') return text;
    const size_t newline = text.rfind('\n');
    if (newline == std::string_view::npos && !line_begins_) return text;
    const size_t first = newline == std::string_view::npos ? 0 : newline + 1;
    const bool is_indentation = std::all_of(text.begin() + first, text.end(), IsSpace);
    return is_indentation ? text.substr(0, first) : text;
  }

  // After the closing `%}`, `}}` or `#}` with its mark: what of the space goes, too.
  void AfterTag(char mark, bool is_block) {
    const size_t end = at_;
    if (mark == '-') {
      while (at_ < source_.size() && IsSpace(source_[at_])) ++at_;
    } else if (is_block && mark != '+' && at_ < source_.size() && source_[at_] == '\n') {
      ++at_;
    }
    line_begins_ = at_ > end && source_[at_ - 1] == '\n';
  }

  absl::Status SkipComment() {
    const size_t end = source_.find("#}", at_ + 2);
    if (end == std::string_view::npos) return Error("a comment without its end");
    const char mark = end > at_ + 2 ? source_[end - 1] : ' ';
    at_ = end + 2;
    AfterTag(mark, /*is_block=*/true);
    return absl::OkStatus();
  }

  absl::Status LexTag() {
    const bool is_block = source_[at_ + 1] == '%';
    Add(is_block ? ChatToken::kStatementBegin : ChatToken::kExpressionBegin, "");
    at_ += 2;
    if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) ++at_;
    const std::string_view close = is_block ? "%}" : "}}";
    int braces = 0;  // open: then `}}` ends objects and no tag
    while (true) {
      while (at_ < source_.size() && IsSpace(source_[at_])) ++at_;
      if (at_ >= source_.size()) return Error("a tag without its end");
      const char mark = source_[at_] == '-' || source_[at_] == '+' ? source_[at_] : ' ';
      if (braces == 0 && source_.substr(at_ + (mark != ' ')).starts_with(close)) {
        Add(ChatToken::kTagEnd, "");
        at_ += close.size() + (mark != ' ');
        AfterTag(mark, is_block);
        return absl::OkStatus();
      }
      if (source_[at_] == '{') ++braces;
      if (source_[at_] == '}') --braces;
      HW_RETURN_IF_ERROR(LexToken());
    }
  }

  absl::Status LexToken() {
    const char c = source_[at_];
    if (c == '\'' || c == '"') return LexString(c);
    size_t end = at_;
    if (IsNameStart(c)) {
      while (end < source_.size() && IsNamePart(source_[end])) ++end;
      return Take(ChatToken::kName, end);
    }
    if (IsDigit(c)) {
      while (end < source_.size() && IsDigit(source_[end])) ++end;
      if (end + 1 < source_.size() && source_[end] == '.' && IsDigit(source_[end + 1])) {
        ++end;
        while (end < source_.size() && IsDigit(source_[end])) ++end;
      }
      return Take(ChatToken::kNumber, end);
    }
    for (const std::string_view op : kOperators) {
      if (StartsWith(op)) return Take(ChatToken::kOperator, at_ + op.size());
    }
    return Error("a character that begins nothing");
  }
  absl::Status Take(ChatToken::Kind kind, size_t end) {
    Add(kind, std::string(source_.substr(at_, end - at_)));
    at_ = end;
    return absl::OkStatus();
  }

  absl::Status LexString(char quote) {
    std::string text;
    size_t i = at_ + 1;
    while (i < source_.size() && source_[i] != quote) {
      if (source_[i] == '\\' && i + 1 < source_.size()) {
        i += Unescape(source_.substr(i), text);
      } else {
        text.push_back(source_[i++]);
      }
    }
    if (i >= source_.size()) return Error("a string without its end");
    Add(ChatToken::kString, std::move(text));
    at_ = i + 1;
    return absl::OkStatus();
  }

  // Of a backslash and more: how many bytes it takes.
  static size_t Unescape(std::string_view rest, std::string& text) {
    const size_t digits = rest[1] == 'x' ? 2 : rest[1] == 'u' ? 4 : 0;
    if (digits > 0 && rest.size() >= 2 + digits) {
      uint32_t code = 0;
      const char* const end = rest.data() + 2 + digits;
      if (std::from_chars(rest.data() + 2, end, code, 16).ptr == end) {
        AppendUtf8(code, text);
        return 2 + digits;
      }
    }
    constexpr std::string_view kFrom = "ntr\\'\"abfv0";
    constexpr std::string_view kTo("\n\t\r\\'\"\a\b\f\v\0", 11);
    const size_t known = kFrom.find(rest[1]);
    if (known == std::string_view::npos) {
      text += rest.substr(0, 2);
    } else {
      text.push_back(kTo[known]);
    }
    return 2;
  }

  const std::string_view source_;
  size_t at_ = 0;
  bool line_begins_ = true;  // at at_, as far as tags go
  std::vector<ChatToken> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<ChatToken>> LexChatTemplate(std::string_view source) {
  std::string text =
      absl::StrReplaceAll({source.data(), source.size()}, {{"\r\n", "\n"}, {"\r", "\n"}});
  if (text.ends_with('\n')) text.pop_back();  // as Jinja does
  return Lexer(text).Run();
}

}  // namespace heavywater
