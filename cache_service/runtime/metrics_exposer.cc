#include "cache_service/runtime/metrics_exposer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace heavywater {
namespace {

constexpr absl::Duration kWakeDelay = absl::Milliseconds(5);

// Makes the server's accept loop turn once. Only IPv4 addresses: others stop at
// the loop's own pace.
void Wake(const std::string& address) {
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port)) return;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) return;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  (void)connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  close(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsExposer>> MetricsExposer::Start(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics_address is \"", address, "\", want HOST:PORT"));
  }
  try {  // civetweb reports a failed bind by throwing
    auto exposer = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/1);
    const int port = exposer->GetListeningPorts().at(0);
    return std::unique_ptr<MetricsExposer>(
        new MetricsExposer(std::move(exposer), absl::StrCat(address.substr(0, colon), ":", port)));
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("metrics_address ", address, " cannot be bound: ", error.what()));
  }
}

MetricsExposer::MetricsExposer(std::unique_ptr<prometheus::Exposer> exposer, std::string address)
    : exposer_(std::move(exposer)), address_(std::move(address)) {}

MetricsExposer::~MetricsExposer() {
  // The accept loop looks whether it should stop every 2 seconds only: a
  // shutdown must not wait for that.
  std::thread stop([this] { exposer_.reset(); });
  absl::SleepFor(kWakeDelay);
  Wake(address_);
  stop.join();
}

void MetricsExposer::Add(std::shared_ptr<prometheus::Collectable> collectable) {
  exposer_->RegisterCollectable(collectable);
  collectables_.push_back(std::move(collectable));
}

}  // namespace heavywater
