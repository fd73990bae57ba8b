// Expressions of a chat template, in Jinja's order of precedence.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/chat/lexer.h"
#include "worker/model/chat/syntax.h"

namespace heavywater {

// Walks over tokens, whose last is kEnd. Every error is INVALID_ARGUMENT with an offset.
class ChatExpressionParser {
 public:
  explicit ChatExpressionParser(const std::vector<ChatToken>& tokens) : tokens_(tokens) {}

  absl::StatusOr<ChatExpr> ParseExpression();  // with a condition behind it, perhaps
  // Without: what follows `in` of a for, whose own `if` is a filter.
  absl::StatusOr<ChatExpr> ParseWithoutCondition() { return ParseOr(); }

  const ChatToken& current() const { return tokens_[at_]; }
  const ChatToken& Advance() { return tokens_[at_ < tokens_.size() - 1 ? at_++ : at_]; }
  bool IsName(std::string_view name) const;
  bool IsOperator(std::string_view op) const;
  // Takes it, when it is there.
  bool TakeName(std::string_view name);
  bool TakeOperator(std::string_view op);
  absl::StatusOr<std::string> WantName();
  absl::Status WantOperator(std::string_view op);
  absl::Status Want(ChatToken::Kind kind, std::string_view what);
  absl::Status Error(std::string_view what) const;

 private:
  using Parse = absl::StatusOr<ChatExpr> (ChatExpressionParser::*)();

  absl::StatusOr<ChatExpr> ParseOr();
  absl::StatusOr<ChatExpr> ParseAnd();
  absl::StatusOr<ChatExpr> ParseNot();
  absl::StatusOr<ChatExpr> ParseCompare();
  absl::StatusOr<ChatExpr> ParseSum();
  absl::StatusOr<ChatExpr> ParseConcatenation();
  absl::StatusOr<ChatExpr> ParseProduct();
  absl::StatusOr<ChatExpr> ParseUnary();
  absl::StatusOr<ChatExpr> ParsePostfix(ChatExpr expr);
  absl::StatusOr<ChatExpr> ParseFilters(ChatExpr expr);
  absl::StatusOr<ChatExpr> ParseTest(ChatExpr expr);
  absl::StatusOr<ChatExpr> ParsePrimary();
  absl::StatusOr<ChatExpr> ParseParenthesis();
  absl::StatusOr<ChatExpr> ParseObject();
  absl::StatusOr<ChatExpr> ParseSubscript(ChatExpr container);
  absl::StatusOr<ChatExpr> ParseNumber();
  absl::Status ParseArguments(ChatExpr& call);  // behind the `(`
  absl::Status ParseList(std::string_view close, ChatExpr& list);
  // Left to right, by operators of one precedence.
  absl::StatusOr<ChatExpr> ParseChain(Parse operand, const std::vector<std::string_view>& ops);

  const std::vector<ChatToken>& tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace heavywater
