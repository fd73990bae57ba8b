#include "cache_service/tier/remote_tier.h"

#include <csignal>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/page_book.h"
#include "cache_service/tier/redis_pool.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {
namespace {

constexpr char kName[] = "remote";
// In one exchange: what a connection holds in memory, twice for a moment.
constexpr size_t kMaxBytesInFlight = 4 << 20;
constexpr size_t kMaxKeysInFlight = 512;

class RemoteTier final : public LowerTier {
 public:
  RemoteTier(const RemoteTierOptions& options, RedisEndpoint endpoint, Clock& clock)
      : prefix_(absl::StrCat("heavywater:", kStoredPageVersion, ":", options.store_id, ":")),
        ttl_ms_(absl::StrCat(absl::ToInt64Milliseconds(options.ttl))),
        pool_(std::move(endpoint), clock),
        book_(kName, options.total_bytes) {}

  const char* name() const override { return kName; }

  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override {
    std::vector<absl::Status> statuses(pages.size());
    size_t next = 0;
    while (next < pages.size()) {
      size_t end = next;
      size_t bytes = 0;
      do {
        bytes += pages[end++].bytes.size();
      } while (end < pages.size() && bytes + pages[end].bytes.size() <= kMaxBytesInFlight);
      PutGroup(pages.subspan(next, end - next), std::span(statuses).subspan(next, end - next));
      next = end;
    }
    return statuses;
  }

  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override {
    absl::StatusOr<uint32_t> crc;
    const absl::Status status = pool_.Run([&](RedisConnection& redis) -> absl::Status {
      const std::string name = Name(key);
      HW_RETURN_IF_ERROR(redis.Send({"GET", name}));
      HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
      HW_RETURN_IF_ERROR(FromReply(*reply));
      if (reply->type != REDIS_REPLY_STRING) {
        return absl::NotFoundError(absl::StrCat(Describe(key), " is not in the remote tier"));
      }
      crc =
          TakeStoredPage(key, std::as_bytes(std::span<const char>(reply->str, reply->len)), bytes);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return crc;
  }

  absl::Status Erase(std::span<const PageKey> keys) override {
    while (!keys.empty()) {
      const size_t count = std::min(keys.size(), kMaxKeysInFlight);
      HW_RETURN_IF_ERROR(EraseGroup(keys.first(count)));
      keys = keys.subspan(count);
    }
    return absl::OkStatus();
  }

  absl::Status EraseSequence(SequenceId sequence) override {
    while (true) {
      const std::vector<PageKey> keys = book_.KeysOf(sequence, kMaxKeysInFlight);
      if (keys.empty()) return absl::OkStatus();
      HW_RETURN_IF_ERROR(EraseGroup(keys));
    }
  }

  // What is left out expires.
  absl::Status Restore(std::span<const StoredPage> pages) override {
    return book_.Restore(pages).status();
  }

  LowerTierStats Stats() const override { return book_.Stats(); }

 private:
  std::string Name(const PageKey& key) const { return prefix_ + StoredKey(key); }

  // Pages that fit into one exchange.
  void PutGroup(std::span<const PageCopy> pages, std::span<absl::Status> statuses) {
    std::vector<bool> added(pages.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      const auto room = book_.Add(pages[i].key, static_cast<int64_t>(pages[i].bytes.size()));
      statuses[i] = room.status();
      added[i] = room.ok() && *room;
    }
    const absl::Status exchanged =
        pool_.Run([&](RedisConnection& redis) { return SendAndAwait(redis, pages, statuses); });
    for (size_t i = 0; i < pages.size(); ++i) {
      if (statuses[i].ok()) statuses[i] = exchanged;
      // Where the answer was lost the page may be there, which nobody will ask for: it
      // is replaced by the next try, or expires.
      if (!statuses[i].ok() && added[i]) book_.Remove(pages[i].key);
    }
  }

  absl::Status SendAndAwait(RedisConnection& redis, std::span<const PageCopy> pages,
                            std::span<absl::Status> statuses) {
    std::string value;
    for (size_t i = 0; i < pages.size(); ++i) {
      if (!statuses[i].ok()) continue;
      const StoredHeader header = MakeStoredHeader(pages[i]);
      value.assign(reinterpret_cast<const char*>(header.data()), header.size());
      value.append(reinterpret_cast<const char*>(pages[i].bytes.data()), pages[i].bytes.size());
      const std::string name = Name(pages[i].key);
      HW_RETURN_IF_ERROR(redis.Send({"SET", name, value, "PX", ttl_ms_}));
    }
    for (absl::Status& status : statuses) {
      if (!status.ok()) continue;
      HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
      status = FromReply(*reply);
    }
    return absl::OkStatus();
  }

  absl::Status EraseGroup(std::span<const PageKey> keys) {
    std::vector<std::string> names;
    for (const PageKey& key : keys) names.push_back(Name(key));
    std::vector<std::string_view> arguments = {"UNLINK"};
    arguments.insert(arguments.end(), names.begin(), names.end());
    HW_RETURN_IF_ERROR(pool_.Run([&](RedisConnection& redis) -> absl::Status {
      HW_RETURN_IF_ERROR(redis.Send(arguments));
      HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
      return FromReply(*reply);
    }));
    for (const PageKey& key : keys) book_.Remove(key);
    return absl::OkStatus();
  }

  const std::string prefix_;
  const std::string ttl_ms_;
  RedisPool pool_;
  PageBook book_;
};

}  // namespace

absl::StatusOr<RedisAddress> ParseRedisAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  RedisAddress parsed;
  if (colon != std::string::npos && colon > 0 &&
      absl::SimpleAtoi(address.substr(colon + 1), &parsed.port) && parsed.port >= 1 &&
      parsed.port <= 65535) {
    parsed.host = address.substr(0, colon);
    return parsed;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("redis_address is \"", address, "\", want HOST:PORT"));
}

absl::StatusOr<std::unique_ptr<LowerTier>> OpenRemoteTier(const RemoteTierOptions& options,
                                                          Clock& clock) {
  HW_ASSIGN_OR_RETURN(RedisAddress address, ParseRedisAddress(options.address));
  RedisEndpoint endpoint = {.host = std::move(address.host),
                            .port = address.port,
                            .timeout = options.timeout,
                            .username = options.username,
                            .password_file = options.password_file,
                            .tls = options.tls};
  HW_RETURN_IF_ERROR(CheckRedisEndpoint(endpoint));
  // hiredis writes to sockets that the other side may have closed.
  std::signal(SIGPIPE, SIG_IGN);
  return std::make_unique<RemoteTier>(options, std::move(endpoint), clock);
}

}  // namespace heavywater
