// The client, linked from outside: nobody listens, and each call says so.
#include <cstdio>

#include "client/cpp/attention_client.h"
#include "client/cpp/client.h"

int main() {
  const char* nobody = "127.0.0.1:1";
  auto client = heavywater::Client::Connect({.worker_address = nobody});
  if (!client.ok()) return 1;
  heavywater::v1::GenerateRequest request;
  request.set_text("It was a dark and stormy night");
  request.set_max_new_tokens(4);
  const auto summary = (*client)->Generate(request, [](const auto& token) { return true; });
  const auto engine = heavywater::AttentionClient::Connect(nobody, {});
  std::printf("%s\n%s\n", summary.status().ToString().c_str(), engine.status().ToString().c_str());
  return absl::IsUnavailable(summary.status()) && absl::IsUnavailable(engine.status()) ? 0 : 1;
}
