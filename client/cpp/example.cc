// heavywater-example WORKER_ADDRESS: continues a text. The lines between the
// marks are the README's.
#include <iostream>
#include <string_view>

#include "cache_service/base/version.h"
#include "client/cpp/client.h"

namespace {

using heavywater::v1::GenerateResponse;

absl::Status Run(const char* worker_address) {
  // [readme
  auto client = heavywater::Client::Connect({.worker_address = worker_address});
  if (!client.ok()) return client.status();

  heavywater::v1::GenerateRequest request;
  request.set_text("It was a dark and stormy night");
  request.set_max_new_tokens(32);
  request.mutable_policy()->set_policy("snapkv_h2o");
  auto summary = (*client)->Generate(request, [](const GenerateResponse& token) {
    std::cout << token.text() << std::flush;
    return true;  // false cancels
  });
  // readme]
  if (!summary.ok()) return summary.status();
  std::cout << "\n" << summary->device_bytes_peak() << " bytes of KV on the device\n";
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || argv[1] == std::string_view("--help")) {
    std::cerr << "usage: heavywater-example WORKER_ADDRESS | --version\n";
    return argc == 2 ? 0 : 2;
  }
  if (argv[1] == std::string_view("--version")) {
    std::cout << "heavywater-example " << heavywater::kVersion << "\n";
    return 0;
  }
  const absl::Status status = Run(argv[1]);
  if (!status.ok()) std::cerr << "error: " << status << "\n";
  return status.ok() ? 0 : 1;
}
