#include "worker/model/chat/template.h"

#include <map>
#include <utility>

#include "cache_service/base/status.h"
#include "worker/model/chat/lexer.h"
#include "worker/model/chat/renderer.h"

namespace heavywater {

absl::StatusOr<ChatTemplate> ChatTemplate::Parse(std::string_view source) {
  HW_ASSIGN_OR_RETURN(const std::vector<ChatToken> tokens, LexChatTemplate(source));
  HW_ASSIGN_OR_RETURN(std::vector<ChatNode> nodes, ParseChatTemplate(tokens));
  return ChatTemplate(std::move(nodes));
}

absl::StatusOr<std::string> ChatTemplate::Render(const std::vector<ChatMessage>& messages,
                                                 const std::string& begin_of_text,
                                                 const std::string& end_of_text) const {
  ChatValue list = ChatValue::array();
  for (const ChatMessage& message : messages) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  std::map<std::string, ChatValue> variables = {{"messages", std::move(list)},
                                                {"add_generation_prompt", true},
                                                {"bos_token", begin_of_text},
                                                {"eos_token", end_of_text}};
  ChatRenderer renderer(std::move(variables));
  HW_RETURN_IF_ERROR(renderer.Render(nodes_));
  return renderer.text();
}

}  // namespace heavywater
