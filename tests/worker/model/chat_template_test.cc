#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "worker/model/chat/template.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::string> Render(std::string_view source,
                                   const std::vector<ChatMessage>& messages = {
                                       {.role = "user", .content = "Hello"}}) {
  const auto chat = ChatTemplate::Parse(source);
  if (!chat.ok()) return chat.status();
  return chat->Render(messages, "<s>", "</s>");
}

// Templates in the manner of the model families', and what Jinja makes of them.
TEST(ChatTemplateTest, EveryConversationReadsAsJinjaRendersIt) {
  std::ifstream file(HEAVYWATER_SOURCE_DIR "/tests/reference/chat_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  int compared = 0;
  for (const auto& one : cases["templates"]) {
    const auto chat = ChatTemplate::Parse(one["template"].get<std::string>());
    ASSERT_TRUE(chat.ok()) << one["name"] << ": " << chat.status();
    for (size_t i = 0; i < cases["conversations"].size(); ++i) {
      std::vector<ChatMessage> messages;
      for (const auto& message : cases["conversations"][i]) {
        messages.push_back({message["role"], message["content"]});
      }
      const auto text = chat->Render(messages, cases["bos_token"], cases["eos_token"]);
      const auto& want = one["rendered"][i];
      if (want.contains("text")) {
        ASSERT_TRUE(text.ok()) << one["name"] << " " << i << ": " << text.status();
        EXPECT_EQ(*text, want["text"].get<std::string>()) << one["name"] << " " << i;
      } else {
        EXPECT_TRUE(absl::IsInvalidArgument(text.status())) << one["name"] << " " << i;
        EXPECT_EQ(text.status().message(), want["error"].get<std::string>());
      }
      ++compared;
    }
  }
  EXPECT_EQ(compared, 36);
}

TEST(ChatTemplateTest, WhatItDoesNotRenderIsNamedWhereItIsReachedAndNotBefore) {
  const auto unimplemented = [](std::string_view source, const char* named) {
    const absl::Status status = Render(source).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << source << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr(named)) << source;
  };
  unimplemented("{{ messages | tojson }}", "filter 'tojson'");
  unimplemented("{{ messages is escaped }}", "test 'escaped'");
  unimplemented("{{ 'a'.zfill(3) }}", "method 'zfill'");
  unimplemented("{{ strftime_now('%Y') }}", "function 'strftime_now'");
  unimplemented("{% macro m(x) %}{{ x }}{% endmacro %}", "statement 'macro'");
  unimplemented("{% include 'x' %}", "statement 'include'");
  unimplemented("{{ messages }}", "writing a list as text");
  unimplemented("{{ 1.5 }}", "writing a number as text");
  unimplemented("{{ 'é' | upper }}", "beyond ASCII");
  EXPECT_EQ(*Render("{% if tools %}{{ tools | tojson }}{% include 'x' %}{% endif %}ok"), "ok");
}

TEST(ChatTemplateTest, WhatIsNoJinjaIsRefusedWithItsPlace) {
  for (const char* source :
       {"{{ 'a }}", "{{ a", "{% if a %}", "{% endif %}", "{% for x of a %}{% endfor %}", "{{ }}",
        "{{ a b }}", "{{ (a }}", "{{ [a }}", "{{ {'a' 1} }}", "{{ a[1:2:3:4] }}", "{# a",
        "{% set 1 = 2 %}", "{{ a < b < c }}", "{{ f(a=1, 2) }}", "{{ $ }}"}) {
    const absl::Status status = Render(source).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << source << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr("at byte")) << source;
  }
}

TEST(ChatTemplateTest, WhatJinjaWouldRaiseIsRaised) {
  for (const char* source : {"{{ a.b.c }}", "{{ 'a' + 1 }}", "{{ 1 < 'a' }}", "{{ a.strip() }}",
                             "{{ a[0] }}", "{% for x in 5 %}{% endfor %}", "{% set a.b = 1 %}",
                             "{% for a, b in ['x'] %}{% endfor %}"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Render(source).status())) << source;
  }
}

TEST(ChatTemplateTest, ATemplateThatDoesNotEndIsStopped) {
  EXPECT_TRUE(absl::IsResourceExhausted(
      Render("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}")
          .status()));
  EXPECT_TRUE(absl::IsResourceExhausted(
      Render(
          "{% for a in range(99999) %}{% for b in range(99) %}0123456789{% endfor %}{% endfor %}")
          .status()));
  const std::string deep(10'000, '(');
  EXPECT_TRUE(absl::IsInvalidArgument(Render(absl::StrCat("{{ ", deep)).status()));
  std::string ifs;
  for (int i = 0; i < 10'000; ++i) absl::StrAppend(&ifs, "{% if a %}");
  EXPECT_TRUE(absl::IsInvalidArgument(Render(ifs).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      Render(absl::StrCat("{{ ", std::string(10'000, '-'), "1 }}")).status()));
}

TEST(ChatTemplateTest, LongConversationsTakeTimeInProportion) {
  const std::string text(1000, 'x');
  std::vector<ChatMessage> messages(4096, {.role = "user", .content = text});
  const auto rendered = Render(
      "{% for m in messages %}{% if messages|length > loop.index0 and messages[0].role == 'user' "
      "and messages[-1].content %}{{ m.content }}{% endif %}{% endfor %}",
      messages);
  ASSERT_TRUE(rendered.ok()) << rendered.status();
  EXPECT_EQ(rendered->size(), 4096 * text.size());
}

}  // namespace
}  // namespace heavywater
