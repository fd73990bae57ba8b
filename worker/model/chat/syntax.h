// The tree of a chat template.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/chat/lexer.h"
#include "worker/model/chat/value.h"

namespace heavywater {

struct ChatExpr {
  enum Kind {
    kLiteral,      // literal
    kName,         // name
    kList,         // children
    kObject,       // children: key, value, key, value, ...
    kElement,      // children: container, key
    kSlice,        // children: container, begin, end, step; literals of undefined where left out
    kCall,         // name; children: arguments
    kMethod,       // name; children: what it is of, arguments
    kFilter,       // likewise
    kTest,         // likewise
    kNot,          // child
    kNegative,     // child
    kBinary,       // name: the operator; children: two
    kAnd,          // children: two
    kOr,           // likewise
    kConditional,  // children: condition, then, else
  };
  Kind kind = kLiteral;
  std::string name = "";
  ChatValue literal = Undefined();
  std::vector<ChatExpr> children = {};
  // Of a call's last arguments: those that were given by name.
  std::vector<std::string> keywords = {};
};

struct ChatNode {
  enum Kind {
    kText,    // text
    kOutput,  // expr
    kIf,      // expr, body, otherwise
    kFor,     // names in expr, where condition; body, otherwise: when there was none
    kSet,     // names: one; or one and the field of it that is set; expr
    kOther,   // text: a statement that this does not render; an error when it is reached
  };
  Kind kind = kText;
  std::string text = "";
  std::vector<std::string> names = {};
  ChatExpr expr = {};
  ChatExpr condition = {};  // of kFor; a literal of undefined: all
  std::vector<ChatNode> body = {};
  std::vector<ChatNode> otherwise = {};
};

// INVALID_ARGUMENT with the offset: it is no Jinja. Statements that this does not render are
// no errors here: a template may have them where no conversation of texts leads.
absl::StatusOr<std::vector<ChatNode>> ParseChatTemplate(const std::vector<ChatToken>& tokens);

}  // namespace heavywater
