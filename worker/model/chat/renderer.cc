#include "worker/model/chat/renderer.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

ChatValue LoopOf(const std::vector<ChatValue>& items, size_t i) {
  const auto index = static_cast<int64_t>(i);
  const auto length = static_cast<int64_t>(items.size());
  ChatValue loop = {{"index", index + 1},
                    {"index0", index},
                    {"revindex", length - index},
                    {"revindex0", length - index - 1},
                    {"first", index == 0},
                    {"last", index + 1 == length},
                    {"length", length}};
  if (i > 0) loop["previtem"] = items[i - 1];
  if (i + 1 < items.size()) loop["nextitem"] = items[i + 1];
  return loop;
}

// Python's: towards minus infinity.
int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

absl::StatusOr<ChatValue> Calculate(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if ((op == "//" || op == "%") && b != 0 && b != -1) {
    result = op == "//" ? FloorDivide(a, b) : a - FloorDivide(a, b) * b;
  } else {
    return absl::UnimplementedError(absl::StrCat("'", op, "' of ", a, " and ", b));
  }
  if (overflow) return absl::InvalidArgumentError(absl::StrCat("'", op, "' overflows"));
  return ChatValue(result);
}

}  // namespace

absl::Status ChatRenderer::Count() {
  if (++steps_ <= kMaxRenderSteps && text_.size() <= kMaxRenderedBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("more than ", kMaxRenderSteps, " steps or ",
                                                   kMaxRenderedBytes, " bytes of text"));
}

absl::Status ChatRenderer::Render(const std::vector<ChatNode>& nodes) {
  for (const ChatNode& node : nodes) {
    HW_RETURN_IF_ERROR(Count());
    HW_RETURN_IF_ERROR(RenderNode(node));
  }
  return absl::OkStatus();
}

absl::Status ChatRenderer::RenderNode(const ChatNode& node) {
  switch (node.kind) {
    case ChatNode::kText:
      text_ += node.text;
      return absl::OkStatus();
    case ChatNode::kOutput: {
      HW_ASSIGN_OR_RETURN(const ChatValue value, Evaluate(node.expr));
      HW_ASSIGN_OR_RETURN(const std::string text, ToText(value));
      text_ += text;
      return Count();
    }
    case ChatNode::kIf: {
      HW_ASSIGN_OR_RETURN(const ChatValue condition, Evaluate(node.expr));
      return Render(IsTrue(condition) ? node.body : node.otherwise);
    }
    case ChatNode::kFor:
      return RenderFor(node);
    case ChatNode::kSet:
      return RenderSet(node);
    case ChatNode::kOther:
      break;
  }
  return absl::UnimplementedError(absl::StrCat("statement '", node.text, "'"));
}

absl::Status ChatRenderer::Bind(const ChatNode& loop, const ChatValue& item) {
  if (loop.names.size() == 1) {
    scopes_.back()[loop.names[0]] = item;
    return absl::OkStatus();
  }
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> parts, ItemsOf(item));
  if (parts.size() != loop.names.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("for: ", parts.size(), " parts for ", loop.names.size(), " names"));
  }
  for (size_t i = 0; i < parts.size(); ++i) scopes_.back()[loop.names[i]] = parts[i];
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ChatValue>> ChatRenderer::Chosen(const ChatNode& loop) {
  HW_ASSIGN_OR_RETURN(const ChatValue list, Evaluate(loop.expr));
  HW_ASSIGN_OR_RETURN(std::vector<ChatValue> items, ItemsOf(list));
  const bool takes_all =
      loop.condition.kind == ChatExpr::kLiteral && IsUndefined(loop.condition.literal);
  if (takes_all) return items;
  std::vector<ChatValue> chosen;
  scopes_.emplace_back();
  const absl::Cleanup leave = [&] { scopes_.pop_back(); };
  for (const ChatValue& item : items) {
    HW_RETURN_IF_ERROR(Bind(loop, item));
    HW_ASSIGN_OR_RETURN(const ChatValue passes, Evaluate(loop.condition));
    if (IsTrue(passes)) chosen.push_back(item);
  }
  return chosen;
}

absl::Status ChatRenderer::RenderFor(const ChatNode& node) {
  HW_ASSIGN_OR_RETURN(const std::vector<ChatValue> items, Chosen(node));
  if (items.empty()) return Render(node.otherwise);
  for (size_t i = 0; i < items.size(); ++i) {
    scopes_.emplace_back();  // what the body sets, it sets for itself
    const absl::Cleanup leave = [&] { scopes_.pop_back(); };
    HW_RETURN_IF_ERROR(Bind(node, items[i]));
    scopes_.back()["loop"] = LoopOf(items, i);
    HW_RETURN_IF_ERROR(Render(node.body));
  }
  return absl::OkStatus();
}

absl::Status ChatRenderer::RenderSet(const ChatNode& node) {
  HW_ASSIGN_OR_RETURN(ChatValue value, Evaluate(node.expr));
  if (node.names.size() == 1) {
    scopes_.back()[node.names[0]] = std::move(value);
    return absl::OkStatus();
  }
  ChatValue* const space = Find(node.names[0]);
  if (space == nullptr || !space->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("set: '", node.names[0], "' is no namespace"));
  }
  (*space)[node.names[1]] = std::move(value);
  return absl::OkStatus();
}

ChatValue* ChatRenderer::Find(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->find(name); found != scope->end()) return &found->second;
  }
  return nullptr;
}

absl::StatusOr<const ChatValue*> ChatRenderer::Refer(const ChatExpr& expr, ChatValue& room) {
  if (expr.kind == ChatExpr::kName) {
    HW_RETURN_IF_ERROR(Count());
    if (const ChatValue* const value = Find(expr.name); value != nullptr) return value;
  }
  HW_ASSIGN_OR_RETURN(room, Evaluate(expr));
  return &room;
}

absl::StatusOr<ChatValue> ChatRenderer::Evaluate(const ChatExpr& expr) {
  HW_RETURN_IF_ERROR(Count());
  switch (expr.kind) {
    case ChatExpr::kLiteral:
      return expr.literal;
    case ChatExpr::kName: {
      const ChatValue* const value = Find(expr.name);
      return value == nullptr ? Undefined() : *value;
    }
    case ChatExpr::kList: {
      HW_ASSIGN_OR_RETURN(const ChatArguments items, ArgumentsOf(expr, 0));
      return ChatValue(items.values);
    }
    case ChatExpr::kObject:
      return EvaluateObject(expr);
    case ChatExpr::kSlice:
      return EvaluateSlice(expr);
    case ChatExpr::kCall:
      return Call(expr);
    case ChatExpr::kBinary:
      return EvaluateBinary(expr);
    default:
      break;
  }
  // Of the others the first child is what they work on.
  ChatValue room;
  HW_ASSIGN_OR_RETURN(const ChatValue* const found, Refer(expr.children.front(), room));
  const ChatValue& first = *found;
  switch (expr.kind) {
    case ChatExpr::kNot:
      return ChatValue(!IsTrue(first));
    case ChatExpr::kNegative:
      if (!first.is_number_integer()) return absl::UnimplementedError("'-' of what is no integer");
      return Calculate("-", 0, first.get<int64_t>());
    case ChatExpr::kAnd:
      return IsTrue(first) ? Evaluate(expr.children[1]) : first;
    case ChatExpr::kOr:
      return IsTrue(first) ? first : Evaluate(expr.children[1]);
    case ChatExpr::kConditional:
      return Evaluate(expr.children[IsTrue(first) ? 1 : 2]);
    case ChatExpr::kElement: {
      HW_ASSIGN_OR_RETURN(const ChatValue key, Evaluate(expr.children[1]));
      return ElementOf(first, key);
    }
    default:
      break;
  }
  HW_ASSIGN_OR_RETURN(const ChatArguments arguments, ArgumentsOf(expr, 1));
  if (expr.kind == ChatExpr::kFilter) return ApplyChatFilter(expr.name, first, arguments);
  if (expr.kind == ChatExpr::kMethod) return CallChatMethod(expr.name, first, arguments);
  HW_ASSIGN_OR_RETURN(const bool passes, ApplyChatTest(expr.name, first, arguments));
  return ChatValue(passes);
}

absl::StatusOr<ChatArguments> ChatRenderer::ArgumentsOf(const ChatExpr& expr, size_t first) {
  ChatArguments arguments;
  const size_t by_place = expr.children.size() - expr.keywords.size();
  for (size_t i = first; i < expr.children.size(); ++i) {
    HW_ASSIGN_OR_RETURN(ChatValue value, Evaluate(expr.children[i]));
    if (i < by_place) {
      arguments.values.push_back(std::move(value));
    } else {
      arguments.by_keyword.emplace_back(expr.keywords[i - by_place], std::move(value));
    }
  }
  return arguments;
}

absl::StatusOr<ChatValue> ChatRenderer::EvaluateObject(const ChatExpr& expr) {
  ChatValue object = ChatValue::object();
  for (size_t i = 0; i < expr.children.size(); i += 2) {
    HW_ASSIGN_OR_RETURN(const ChatValue key, Evaluate(expr.children[i]));
    HW_ASSIGN_OR_RETURN(ChatValue value, Evaluate(expr.children[i + 1]));
    if (!key.is_string()) return absl::UnimplementedError("an object's key that is no text");
    object[key.get<std::string>()] = std::move(value);
  }
  return object;
}

absl::StatusOr<ChatValue> ChatRenderer::EvaluateSlice(const ChatExpr& expr) {
  ChatValue room;
  HW_ASSIGN_OR_RETURN(const ChatValue* const container, Refer(expr.children.front(), room));
  HW_ASSIGN_OR_RETURN(const ChatArguments limits, ArgumentsOf(expr, 1));
  return SliceOf(*container, limits.At(0), limits.At(1), limits.At(2));
}

absl::StatusOr<ChatValue> ChatRenderer::EvaluateBinary(const ChatExpr& expr) {
  ChatValue room_a;
  ChatValue room_b;
  HW_ASSIGN_OR_RETURN(const ChatValue* const left, Refer(expr.children[0], room_a));
  HW_ASSIGN_OR_RETURN(const ChatValue* const right, Refer(expr.children[1], room_b));
  const ChatValue& a = *left;
  const ChatValue& b = *right;
  const std::string& op = expr.name;
  if (op == "==") return ChatValue(AreEqual(a, b));
  if (op == "!=") return ChatValue(!AreEqual(a, b));
  if (op == "in") {
    HW_ASSIGN_OR_RETURN(const bool is_in, IsIn(a, b));
    return ChatValue(is_in);
  }
  if (op == "<" || op == ">=") {
    HW_ASSIGN_OR_RETURN(const bool is_less, IsLess(a, b));
    return ChatValue(is_less == (op == "<"));
  }
  if (op == ">" || op == "<=") {
    HW_ASSIGN_OR_RETURN(const bool is_less, IsLess(b, a));
    return ChatValue(is_less == (op == ">"));
  }
  if (op == "~") {
    HW_ASSIGN_OR_RETURN(const std::string text_a, ToText(a));
    HW_ASSIGN_OR_RETURN(const std::string text_b, ToText(b));
    return ChatValue(text_a + text_b);
  }
  if (op == "+" && a.is_string() && b.is_string()) {
    return ChatValue(a.get<std::string>() + b.get<std::string>());
  }
  if (op == "+" && a.is_array() && b.is_array()) {
    ChatValue joined = a;
    for (const ChatValue& item : b) joined.push_back(item);
    return joined;
  }
  if (a.is_number_integer() && b.is_number_integer()) {
    return Calculate(op, a.get<int64_t>(), b.get<int64_t>());
  }
  if (a.is_number() && b.is_number()) return absl::UnimplementedError("fractions");
  return absl::InvalidArgumentError(
      absl::StrCat("'", op, "' of ", std::string(KindOf(a)), " and ", std::string(KindOf(b))));
}

absl::StatusOr<ChatValue> ChatRenderer::Call(const ChatExpr& expr) {
  HW_ASSIGN_OR_RETURN(const ChatArguments arguments, ArgumentsOf(expr, 0));
  if (expr.name == "raise_exception") {
    return absl::InvalidArgumentError(ToText(arguments.At(0)).value_or("raise_exception"));
  }
  if (expr.name == "namespace" || expr.name == "dict") {
    ChatValue space = ChatValue::object();
    for (const auto& [name, value] : arguments.by_keyword) space[name] = value;
    return space;
  }
  if (expr.name == "range") {
    const bool has_begin = arguments.values.size() > 1;
    const ChatValue begin = has_begin ? arguments.At(0) : ChatValue(int64_t{0});
    const ChatValue end = arguments.At(has_begin ? 1 : 0);
    if (!begin.is_number_integer() || !end.is_number_integer() || arguments.values.size() > 2) {
      return absl::UnimplementedError("'range' of other than one or two integers");
    }
    ChatValue numbers = ChatValue::array();
    for (int64_t i = begin.get<int64_t>(); i < end.get<int64_t>(); ++i) {
      HW_RETURN_IF_ERROR(Count());
      numbers.push_back(i);
    }
    return numbers;
  }
  return absl::UnimplementedError(absl::StrCat("function '", expr.name, "'"));
}

}  // namespace heavywater
