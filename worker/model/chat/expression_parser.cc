#include "worker/model/chat/expression_parser.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int kMaxDepth = 64;

ChatExpr Make(ChatExpr::Kind kind, std::string name, std::vector<ChatExpr> children) {
  return {.kind = kind, .name = std::move(name), .children = std::move(children)};
}
ChatExpr Literal(ChatValue value) { return {.literal = std::move(value)}; }

}  // namespace

bool ChatExpressionParser::IsName(std::string_view name) const {
  return current().kind == ChatToken::kName && current().text == name;
}
bool ChatExpressionParser::IsOperator(std::string_view op) const {
  return current().kind == ChatToken::kOperator && current().text == op;
}
bool ChatExpressionParser::TakeName(std::string_view name) {
  const bool is_there = IsName(name);
  if (is_there) Advance();
  return is_there;
}
bool ChatExpressionParser::TakeOperator(std::string_view op) {
  const bool is_there = IsOperator(op);
  if (is_there) Advance();
  return is_there;
}

absl::Status ChatExpressionParser::Error(std::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrCat("at byte ", current().offset, ": ", std::string(what)));
}

absl::StatusOr<std::string> ChatExpressionParser::WantName() {
  if (current().kind != ChatToken::kName) return Error("want a name");
  return Advance().text;
}
absl::Status ChatExpressionParser::WantOperator(std::string_view op) {
  if (TakeOperator(op)) return absl::OkStatus();
  return Error(absl::StrCat("want '", std::string(op), "'"));
}
absl::Status ChatExpressionParser::Want(ChatToken::Kind kind, std::string_view what) {
  if (current().kind != kind) return Error(absl::StrCat("want ", std::string(what)));
  Advance();
  return absl::OkStatus();
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseExpression() {
  if (++depth_ > kMaxDepth) return Error("expressions lie too deep in each other");
  const absl::Cleanup leave = [&] { --depth_; };
  HW_ASSIGN_OR_RETURN(ChatExpr expr, ParseOr());
  while (TakeName("if")) {
    HW_ASSIGN_OR_RETURN(ChatExpr condition, ParseOr());
    ChatExpr otherwise = Literal(Undefined());
    if (TakeName("else")) {
      HW_ASSIGN_OR_RETURN(otherwise, ParseExpression());
    }
    expr = Make(ChatExpr::kConditional, "",
                {std::move(condition), std::move(expr), std::move(otherwise)});
  }
  return expr;
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseOr() {
  HW_ASSIGN_OR_RETURN(ChatExpr left, ParseAnd());
  while (TakeName("or")) {
    HW_ASSIGN_OR_RETURN(ChatExpr right, ParseAnd());
    left = Make(ChatExpr::kOr, "", {std::move(left), std::move(right)});
  }
  return left;
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseAnd() {
  HW_ASSIGN_OR_RETURN(ChatExpr left, ParseNot());
  while (TakeName("and")) {
    HW_ASSIGN_OR_RETURN(ChatExpr right, ParseNot());
    left = Make(ChatExpr::kAnd, "", {std::move(left), std::move(right)});
  }
  return left;
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseNot() {
  if (!TakeName("not")) return ParseCompare();
  if (++depth_ > kMaxDepth) return Error("expressions lie too deep in each other");
  const absl::Cleanup leave = [&] { --depth_; };
  HW_ASSIGN_OR_RETURN(ChatExpr operand, ParseNot());
  return Make(ChatExpr::kNot, "", {std::move(operand)});
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseCompare() {
  constexpr std::string_view kCompare[] = {"==", "!=", "<=", ">=", "<", ">"};
  HW_ASSIGN_OR_RETURN(ChatExpr left, ParseSum());
  int count = 0;
  while (true) {
    const bool negated =
        IsName("not") && tokens_[at_ + 1].kind == ChatToken::kName && tokens_[at_ + 1].text == "in";
    if (negated) Advance();
    std::string op;
    if (TakeName("in")) {
      op = "in";
    } else if (std::ranges::any_of(kCompare, [&](std::string_view o) { return IsOperator(o); })) {
      op = Advance().text;
    } else {
      return left;
    }
    // Python's a < b < c is no chain from left to right.
    if (++count > 1) return Error("comparisons in a row");
    HW_ASSIGN_OR_RETURN(ChatExpr right, ParseSum());
    left = Make(ChatExpr::kBinary, op, {std::move(left), std::move(right)});
    if (negated) left = Make(ChatExpr::kNot, "", {std::move(left)});
  }
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseChain(
    Parse operand, const std::vector<std::string_view>& ops) {
  HW_ASSIGN_OR_RETURN(ChatExpr left, (this->*operand)());
  while (std::ranges::any_of(ops, [&](std::string_view op) { return IsOperator(op); })) {
    const std::string op = Advance().text;
    HW_ASSIGN_OR_RETURN(ChatExpr right, (this->*operand)());
    left = Make(ChatExpr::kBinary, op, {std::move(left), std::move(right)});
  }
  return left;
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseSum() {
  return ParseChain(&ChatExpressionParser::ParseConcatenation, {"+", "-"});
}
absl::StatusOr<ChatExpr> ChatExpressionParser::ParseConcatenation() {
  return ParseChain(&ChatExpressionParser::ParseProduct, {"~"});
}
absl::StatusOr<ChatExpr> ChatExpressionParser::ParseProduct() {
  return ParseChain(&ChatExpressionParser::ParseUnary, {"*", "/", "//", "%"});
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseUnary() {
  if (TakeOperator("-")) {
    if (++depth_ > kMaxDepth) return Error("expressions lie too deep in each other");
    const absl::Cleanup leave = [&] { --depth_; };
    HW_ASSIGN_OR_RETURN(ChatExpr operand, ParseUnary());
    return Make(ChatExpr::kNegative, "", {std::move(operand)});
  }
  HW_ASSIGN_OR_RETURN(ChatExpr expr, ParsePrimary());
  HW_ASSIGN_OR_RETURN(expr, ParsePostfix(std::move(expr)));
  return ParseFilters(std::move(expr));
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParsePostfix(ChatExpr expr) {
  while (true) {
    if (TakeOperator(".")) {
      HW_ASSIGN_OR_RETURN(std::string name, WantName());
      if (TakeOperator("(")) {
        expr = Make(ChatExpr::kMethod, std::move(name), {std::move(expr)});
        HW_RETURN_IF_ERROR(ParseArguments(expr));
      } else {
        expr = Make(ChatExpr::kElement, "", {std::move(expr), Literal(std::move(name))});
      }
    } else if (TakeOperator("[")) {
      HW_ASSIGN_OR_RETURN(expr, ParseSubscript(std::move(expr)));
    } else if (expr.kind == ChatExpr::kName && TakeOperator("(")) {
      expr.kind = ChatExpr::kCall;
      HW_RETURN_IF_ERROR(ParseArguments(expr));
    } else {
      return expr;
    }
  }
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseSubscript(ChatExpr container) {
  ChatExpr parts[3] = {Literal(Undefined()), Literal(Undefined()), Literal(Undefined())};
  int part = 0;
  while (!IsOperator("]")) {
    if (TakeOperator(":")) {
      if (++part > 2) return Error("a slice of more than three parts");
      continue;
    }
    HW_ASSIGN_OR_RETURN(parts[part], ParseExpression());
    if (!IsOperator(":") && !IsOperator("]")) return Error("want ']' or ':'");
  }
  Advance();
  if (part == 0) {
    return Make(ChatExpr::kElement, "", {std::move(container), std::move(parts[0])});
  }
  return Make(
      ChatExpr::kSlice, "",
      {std::move(container), std::move(parts[0]), std::move(parts[1]), std::move(parts[2])});
}

absl::Status ChatExpressionParser::ParseArguments(ChatExpr& call) {
  while (!TakeOperator(")")) {
    const bool is_keyword = current().kind == ChatToken::kName &&
                            tokens_[at_ + 1].kind == ChatToken::kOperator &&
                            tokens_[at_ + 1].text == "=";
    if (is_keyword) {
      call.keywords.push_back(Advance().text);
      Advance();
    } else if (!call.keywords.empty()) {
      return Error("an argument without a name behind one that has one");
    }
    HW_ASSIGN_OR_RETURN(ChatExpr argument, ParseExpression());
    call.children.push_back(std::move(argument));
    if (!TakeOperator(",") && !IsOperator(")")) return Error("want ',' or ')'");
  }
  return absl::OkStatus();
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseFilters(ChatExpr expr) {
  while (true) {
    if (TakeOperator("|")) {
      HW_ASSIGN_OR_RETURN(std::string name, WantName());
      expr = Make(ChatExpr::kFilter, std::move(name), {std::move(expr)});
      if (TakeOperator("(")) HW_RETURN_IF_ERROR(ParseArguments(expr));
    } else if (TakeName("is")) {
      HW_ASSIGN_OR_RETURN(expr, ParseTest(std::move(expr)));
    } else {
      return expr;
    }
  }
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseTest(ChatExpr expr) {
  const bool negated = TakeName("not");
  HW_ASSIGN_OR_RETURN(std::string name, WantName());
  ChatExpr test = Make(ChatExpr::kTest, std::move(name), {std::move(expr)});
  const ChatToken::Kind next = current().kind;
  const bool is_word = IsName("else") || IsName("or") || IsName("and") || IsName("is") ||
                       IsName("if") || IsName("in") || IsName("not");
  if (TakeOperator("(")) {
    HW_RETURN_IF_ERROR(ParseArguments(test));
  } else if (next == ChatToken::kString || next == ChatToken::kNumber ||
             (next == ChatToken::kName && !is_word)) {
    HW_ASSIGN_OR_RETURN(ChatExpr argument, ParsePrimary());
    HW_ASSIGN_OR_RETURN(argument, ParsePostfix(std::move(argument)));
    test.children.push_back(std::move(argument));
  }
  if (!negated) return test;
  return Make(ChatExpr::kNot, "", {std::move(test)});
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParsePrimary() {
  const ChatToken token = current();
  switch (token.kind) {
    case ChatToken::kString: {
      std::string text;
      while (current().kind == ChatToken::kString) text += Advance().text;
      return Literal(std::move(text));
    }
    case ChatToken::kNumber:
      return ParseNumber();
    case ChatToken::kName:
      Advance();
      if (token.text == "true" || token.text == "True") return Literal(true);
      if (token.text == "false" || token.text == "False") return Literal(false);
      if (token.text == "none" || token.text == "None") return Literal(nullptr);
      return Make(ChatExpr::kName, token.text, {});
    default:
      break;
  }
  if (TakeOperator("(")) return ParseParenthesis();
  if (TakeOperator("[")) {
    ChatExpr list = Make(ChatExpr::kList, "", {});
    HW_RETURN_IF_ERROR(ParseList("]", list));
    return list;
  }
  if (TakeOperator("{")) return ParseObject();
  return Error("want an expression");
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseNumber() {
  const std::string text = Advance().text;
  int64_t integer = 0;
  double number = 0;
  if (absl::SimpleAtoi(text, &integer)) return Literal(integer);
  if (absl::SimpleAtod(text, &number)) return Literal(number);
  return Error("a number out of range");
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseParenthesis() {
  HW_ASSIGN_OR_RETURN(ChatExpr first, ParseExpression());
  if (TakeOperator(")")) return first;
  HW_RETURN_IF_ERROR(WantOperator(","));
  ChatExpr tuple = Make(ChatExpr::kList, "", {std::move(first)});
  HW_RETURN_IF_ERROR(ParseList(")", tuple));
  return tuple;
}

absl::Status ChatExpressionParser::ParseList(std::string_view close, ChatExpr& list) {
  while (!TakeOperator(close)) {
    HW_ASSIGN_OR_RETURN(ChatExpr item, ParseExpression());
    list.children.push_back(std::move(item));
    if (!TakeOperator(",") && !IsOperator(close)) return Error("want ',' or the end of the list");
  }
  return absl::OkStatus();
}

absl::StatusOr<ChatExpr> ChatExpressionParser::ParseObject() {
  ChatExpr object = Make(ChatExpr::kObject, "", {});
  while (!TakeOperator("}")) {
    HW_ASSIGN_OR_RETURN(ChatExpr key, ParseExpression());
    HW_RETURN_IF_ERROR(WantOperator(":"));
    HW_ASSIGN_OR_RETURN(ChatExpr value, ParseExpression());
    object.children.push_back(std::move(key));
    object.children.push_back(std::move(value));
    if (!TakeOperator(",") && !IsOperator("}")) return Error("want ',' or '}'");
  }
  return object;
}

}  // namespace heavywater
