#include "worker/model/chat/syntax.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/model/chat/expression_parser.h"

namespace heavywater {
namespace {

constexpr int kMaxDepth = 64;

class NodeParser {
 public:
  explicit NodeParser(const std::vector<ChatToken>& tokens) : in_(tokens) {}

  absl::StatusOr<std::vector<ChatNode>> Run() {
    HW_ASSIGN_OR_RETURN(std::vector<ChatNode> nodes, ParseBody({}));
    if (in_.current().kind != ChatToken::kEnd) return in_.Error("an end of nothing");
    return nodes;
  }

 private:
  // Until a statement of one of these names, which is current then, or the end.
  absl::StatusOr<std::vector<ChatNode>> ParseBody(const std::vector<std::string_view>& ends) {
    if (++depth_ > kMaxDepth) return in_.Error("statements lie too deep in each other");
    std::vector<ChatNode> nodes;
    while (in_.current().kind != ChatToken::kEnd) {
      if (in_.current().kind == ChatToken::kText) {
        nodes.push_back({.kind = ChatNode::kText, .text = in_.Advance().text});
      } else if (in_.current().kind == ChatToken::kExpressionBegin) {
        in_.Advance();
        HW_ASSIGN_OR_RETURN(ChatExpr expr, in_.ParseExpression());
        HW_RETURN_IF_ERROR(EndTag());
        nodes.push_back({.kind = ChatNode::kOutput, .expr = std::move(expr)});
      } else {
        in_.Advance();  // {%
        const bool ended =
            std::ranges::any_of(ends, [&](std::string_view end) { return in_.IsName(end); });
        if (ended) break;
        HW_ASSIGN_OR_RETURN(ChatNode node, ParseStatement());
        nodes.push_back(std::move(node));
      }
    }
    --depth_;
    return nodes;
  }

  absl::Status EndTag() { return in_.Want(ChatToken::kTagEnd, "the end of the tag"); }
  absl::Status EndStatement(std::string_view name) {
    if (!in_.TakeName(name)) return in_.Error(absl::StrCat("want ", std::string(name)));
    return EndTag();
  }

  absl::StatusOr<ChatNode> ParseStatement() {
    if (in_.TakeName("if")) return ParseIf();
    if (in_.TakeName("for")) return ParseFor();
    if (in_.TakeName("set")) return ParseSet();
    return ParseOther();
  }

  absl::StatusOr<ChatNode> ParseIf() {
    ChatNode node = {.kind = ChatNode::kIf};
    HW_ASSIGN_OR_RETURN(node.expr, in_.ParseExpression());
    HW_RETURN_IF_ERROR(EndTag());
    HW_ASSIGN_OR_RETURN(node.body, ParseBody({"elif", "else", "endif"}));
    if (in_.TakeName("elif")) {
      if (++depth_ > kMaxDepth) return in_.Error("too many elif");
      HW_ASSIGN_OR_RETURN(ChatNode next, ParseIf());
      --depth_;
      node.otherwise.push_back(std::move(next));
      return node;  // the last one took the endif
    }
    if (in_.TakeName("else")) {
      HW_RETURN_IF_ERROR(EndTag());
      HW_ASSIGN_OR_RETURN(node.otherwise, ParseBody({"endif"}));
    }
    HW_RETURN_IF_ERROR(EndStatement("endif"));
    return node;
  }

  absl::StatusOr<ChatNode> ParseFor() {
    ChatNode node = {.kind = ChatNode::kFor};
    do {
      HW_ASSIGN_OR_RETURN(std::string name, in_.WantName());
      node.names.push_back(std::move(name));
    } while (in_.TakeOperator(","));
    if (!in_.TakeName("in")) return in_.Error("want 'in'");
    HW_ASSIGN_OR_RETURN(node.expr, in_.ParseWithoutCondition());
    if (in_.TakeName("if")) {
      HW_ASSIGN_OR_RETURN(node.condition, in_.ParseExpression());
    }
    HW_RETURN_IF_ERROR(EndTag());
    HW_ASSIGN_OR_RETURN(node.body, ParseBody({"else", "endfor"}));
    if (in_.TakeName("else")) {
      HW_RETURN_IF_ERROR(EndTag());
      HW_ASSIGN_OR_RETURN(node.otherwise, ParseBody({"endfor"}));
    }
    HW_RETURN_IF_ERROR(EndStatement("endfor"));
    return node;
  }

  absl::StatusOr<ChatNode> ParseSet() {
    ChatNode node = {.kind = ChatNode::kSet};
    HW_ASSIGN_OR_RETURN(std::string name, in_.WantName());
    node.names.push_back(std::move(name));
    if (in_.TakeOperator(".")) {
      HW_ASSIGN_OR_RETURN(std::string field, in_.WantName());
      node.names.push_back(std::move(field));
    }
    if (in_.current().kind == ChatToken::kTagEnd) return ParseRest("set");
    HW_RETURN_IF_ERROR(in_.WantOperator("="));
    HW_ASSIGN_OR_RETURN(node.expr, in_.ParseExpression());
    HW_RETURN_IF_ERROR(EndTag());
    return node;
  }

  absl::StatusOr<ChatNode> ParseOther() {
    if (in_.current().kind != ChatToken::kName) return in_.Error("want a statement");
    if (in_.current().text.starts_with("end") || in_.IsName("else") || in_.IsName("elif")) {
      return in_.Error("an end of what has not begun");
    }
    const std::string name = in_.Advance().text;
    const bool has_body = name == "macro" || name == "call" || name == "filter" ||
                          name == "generation" || name == "block" || name == "with";
    if (has_body) return ParseRest(name);
    while (in_.current().kind != ChatToken::kTagEnd && in_.current().kind != ChatToken::kEnd) {
      in_.Advance();
    }
    HW_RETURN_IF_ERROR(EndTag());
    return ChatNode{.kind = ChatNode::kOther, .text = name};
  }

  // Of a statement with a body that is not rendered.
  absl::StatusOr<ChatNode> ParseRest(const std::string& name) {
    while (in_.current().kind != ChatToken::kTagEnd && in_.current().kind != ChatToken::kEnd) {
      in_.Advance();
    }
    HW_RETURN_IF_ERROR(EndTag());
    const std::string end = absl::StrCat("end", name);
    HW_RETURN_IF_ERROR(ParseBody({end}).status());
    HW_RETURN_IF_ERROR(EndStatement(end));
    return ChatNode{.kind = ChatNode::kOther, .text = name};
  }

  ChatExpressionParser in_;
  int depth_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<ChatNode>> ParseChatTemplate(const std::vector<ChatToken>& tokens) {
  return NodeParser(tokens).Run();
}

}  // namespace heavywater
