// Chat templates: the text of a conversation, as the model was taught it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/chat/syntax.h"

namespace heavywater {

struct ChatMessage {
  std::string role;
  std::string content;
};

// The part of Jinja that templates need for conversations of texts. Immutable and thread
// safe.
class ChatTemplate {
 public:
  // INVALID_ARGUMENT with the offset: it is no Jinja that this understands.
  static absl::StatusOr<ChatTemplate> Parse(std::string_view source);

  // Ends where the answer begins (add_generation_prompt). INVALID_ARGUMENT: the template
  // refuses the conversation (its own words); UNIMPLEMENTED naming what of Jinja it uses
  // that this does not render. Never a text that differs from Jinja's.
  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                     const std::string& begin_of_text,
                                     const std::string& end_of_text) const;

 private:
  explicit ChatTemplate(std::vector<ChatNode> nodes) : nodes_(std::move(nodes)) {}

  std::vector<ChatNode> nodes_;
};

}  // namespace heavywater
