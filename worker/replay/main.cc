// heavywater-replay: a question in JSON on standard input (replay_json.h), the answer in
// JSON on standard output.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "worker/replay/replay_json.h"

int main() {
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  const auto answer = heavywater::AnswerReplayRequest(text);
  if (!answer.ok()) {
    std::fprintf(stderr, "%s\n", std::string(answer.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", answer->dump().c_str());
  return 0;
}
