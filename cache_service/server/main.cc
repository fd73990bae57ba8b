// heavywater-cache: the cache service.
#include <cstdio>
#include <memory>

#include "cache_service/base/version.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/memory_trim.h"
#include "cache_service/runtime/shutdown_signal.h"
#include "cache_service/server/cache_config.h"
#include "cache_service/server/cache_server.h"

namespace heavywater {
namespace {

constexpr char kBinary[] = "heavywater-cache";
constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr int kBadUsage = 2;

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "%s: %s\n", kBinary, std::string(status.message()).c_str());
  return code;
}

int Check(const v1::CacheConfig& config) {
  const absl::Status valid = ValidateCacheConfig(config);
  if (!valid.ok()) return Fail(valid, kBadUsage);
  std::fputs(ConfigToYaml(config).c_str(), stdout);
  return 0;
}

int Serve(const v1::CacheConfig& config, ShutdownSignal& signal) {
  absl::StatusOr<std::unique_ptr<CacheServer>> server = CacheServer::Start(config);
  if (!server.ok()) {
    return Fail(server.status(), absl::IsInvalidArgument(server.status()) ? kBadUsage : 1);
  }
  (*server)->PrintAddresses();
  const MemoryTrim trim;
  while (!signal.WaitFor(kTick)) (*server)->Tick();
  LogInfo("draining");
  (*server)->Drain();
  server->reset();
  LogInfo("stopped");
  return 0;
}

int Main(int argc, char** argv) {
  ShutdownSignal signal;
  v1::CacheConfig config = DefaultCacheConfig();
  const absl::StatusOr<Flags> flags = ParseFlags(argc, argv, config);
  if (!flags.ok()) return Fail(flags.status(), kBadUsage);
  if (flags->show_version) {
    std::printf("%s %s\n", kBinary, kVersion);
    return 0;
  }
  if (flags->show_help) {
    std::fputs(ConfigHelp(kBinary, config).c_str(), stdout);
    return 0;
  }
  const absl::Status loaded = LoadConfig(flags->config_path, flags->overrides, &config);
  if (!loaded.ok()) return Fail(loaded, kBadUsage);
  const absl::Status logging =
      InitLogging({.level = config.log_level(), .json = config.log_json(), .process = kBinary});
  if (!logging.ok()) return Fail(logging, kBadUsage);
  return flags->check_config ? Check(config) : Serve(config, signal);
}

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) { return heavywater::Main(argc, argv); }
