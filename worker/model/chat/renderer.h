// Renders the tree of a chat template.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/chat/builtins.h"
#include "worker/model/chat/syntax.h"
#include "worker/model/chat/value.h"

namespace heavywater {

inline constexpr size_t kMaxRenderedBytes = size_t{16} << 20;
inline constexpr int64_t kMaxRenderSteps = 1'000'000;  // expressions and statements

// For one rendering. INVALID_ARGUMENT: Jinja would raise an error, too, or the template has
// (raise_exception); UNIMPLEMENTED: something that this does not render;
// RESOURCE_EXHAUSTED: beyond the limits.
class ChatRenderer {
 public:
  explicit ChatRenderer(std::map<std::string, ChatValue> variables) {
    scopes_.push_back(std::move(variables));
  }

  absl::Status Render(const std::vector<ChatNode>& nodes);
  const std::string& text() const { return text_; }

 private:
  absl::Status RenderNode(const ChatNode& node);
  absl::Status RenderFor(const ChatNode& node);
  absl::Status RenderSet(const ChatNode& node);
  absl::Status Bind(const ChatNode& loop, const ChatValue& item);
  absl::StatusOr<std::vector<ChatValue>> Chosen(const ChatNode& loop);

  absl::StatusOr<ChatValue> Evaluate(const ChatExpr& expr);
  // Likewise without a copy where the value is a variable's; else it is put into `room`.
  absl::StatusOr<const ChatValue*> Refer(const ChatExpr& expr, ChatValue& room);
  absl::StatusOr<ChatValue> EvaluateBinary(const ChatExpr& expr);
  absl::StatusOr<ChatValue> EvaluateObject(const ChatExpr& expr);
  absl::StatusOr<ChatValue> EvaluateSlice(const ChatExpr& expr);
  absl::StatusOr<ChatValue> Call(const ChatExpr& expr);
  // From `first` of the children on.
  absl::StatusOr<ChatArguments> ArgumentsOf(const ChatExpr& expr, size_t first);
  absl::Status Count();

  ChatValue* Find(const std::string& name);

  std::vector<std::map<std::string, ChatValue>> scopes_;  // the innermost last
  std::string text_;
  int64_t steps_ = 0;
};

}  // namespace heavywater
