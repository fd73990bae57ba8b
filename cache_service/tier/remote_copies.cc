#include "cache_service/tier/remote_copies.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/remote_tier.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {
namespace {

// Of one exchange, as in the remote tier.
constexpr size_t kMaxBytesInFlight = 4 << 20;
constexpr size_t kChunkBytes = 1 << 20;

std::string NameOf(const std::string& copy) {
  return absl::StrCat("heavywater:copy:", kStoredPageVersion, ":", copy);
}

std::string PageField(const PageKey& key) { return "p" + StoredKey(key); }
std::string ChunkField(size_t chunk) { return absl::StrCat("s", chunk); }

struct Field {
  std::string name;
  std::string value;
};

// Fields of one copy, and its time.
absl::Status Send(RedisConnection& redis, const std::string& name, std::span<const Field> fields,
                  absl::Duration ttl) {
  for (const Field& field : fields) {
    HW_RETURN_IF_ERROR(redis.Send({"HSET", name, field.name, field.value}));
  }
  HW_RETURN_IF_ERROR(redis.Send({"PEXPIRE", name, absl::StrCat(absl::ToInt64Milliseconds(ttl))}));
  absl::Status status;
  for (size_t answers = 0; answers <= fields.size(); ++answers) {
    HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
    status.Update(FromReply(*reply));
  }
  return status;
}

// The values, in the order of the names.
absl::Status Fetch(RedisConnection& redis, const std::string& name,
                   std::span<const std::string> fields, std::vector<std::string>* values) {
  for (const std::string& field : fields) HW_RETURN_IF_ERROR(redis.Send({"HGET", name, field}));
  absl::Status status;
  values->clear();
  for (size_t i = 0; i < fields.size(); ++i) {
    HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
    status.Update(FromReply(*reply));
    if (reply->type == REDIS_REPLY_STRING) values->emplace_back(reply->str, reply->len);
  }
  if (status.ok() && values->size() < fields.size()) {
    return absl::NotFoundError(absl::StrCat("of ", fields.size(), " parts of copy ", name, " only ",
                                            values->size(), " are in the Redis"));
  }
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteCopies>> RemoteCopies::Create(const std::string& address,
                                                                   RedisEndpoint endpoint,
                                                                   Clock& clock) {
  HW_ASSIGN_OR_RETURN(RedisAddress parsed, ParseRedisAddress(address));
  endpoint.host = std::move(parsed.host);
  endpoint.port = parsed.port;
  HW_RETURN_IF_ERROR(CheckRedisEndpoint(endpoint));
  // hiredis writes to sockets that the other side may have closed.
  std::signal(SIGPIPE, SIG_IGN);
  return std::unique_ptr<RemoteCopies>(new RemoteCopies(std::move(endpoint), clock));
}

absl::Status RemoteCopies::PutPages(const std::string& copy, std::span<const PageCopy> pages,
                                    absl::Duration ttl) {
  const std::string name = NameOf(copy);
  for (size_t next = 0; next < pages.size();) {
    std::vector<Field> fields;
    for (size_t bytes = 0; next < pages.size() && bytes < kMaxBytesInFlight; ++next) {
      const StoredHeader header = MakeStoredHeader(pages[next]);
      Field& field = fields.emplace_back();
      field.name = PageField(pages[next].key);
      field.value.assign(reinterpret_cast<const char*>(header.data()), header.size());
      field.value.append(reinterpret_cast<const char*>(pages[next].bytes.data()),
                         pages[next].bytes.size());
      bytes += field.value.size();
    }
    HW_RETURN_IF_ERROR(
        pool_.Run([&](RedisConnection& redis) { return Send(redis, name, fields, ttl); }));
  }
  return absl::OkStatus();
}

absl::Status RemoteCopies::PutState(const std::string& copy, std::string_view state,
                                    absl::Duration ttl) {
  const std::string name = NameOf(copy);
  for (size_t chunk = 0; chunk * kChunkBytes < state.size(); ++chunk) {
    const Field field = {ChunkField(chunk),
                         std::string(state.substr(chunk * kChunkBytes, kChunkBytes))};
    HW_RETURN_IF_ERROR(pool_.Run([&](RedisConnection& redis) {
      return Send(redis, name, {&field, 1}, ttl);
    }));
  }
  return absl::OkStatus();
}

absl::Status RemoteCopies::GetPages(const std::string& copy, std::span<const PageKey> keys,
                                    std::span<std::byte> bytes) {
  if (keys.empty()) return absl::OkStatus();
  const size_t page_bytes = bytes.size() / keys.size();
  const size_t batch = std::max<size_t>(1, kMaxBytesInFlight / page_bytes);
  for (size_t begin = 0; begin < keys.size(); begin += batch) {
    const size_t end = std::min(keys.size(), begin + batch);
    std::vector<std::string> fields;
    for (size_t i = begin; i < end; ++i) fields.push_back(PageField(keys[i]));
    std::vector<std::string> values;
    HW_RETURN_IF_ERROR(pool_.Run(
        [&](RedisConnection& redis) { return Fetch(redis, NameOf(copy), fields, &values); }));
    for (size_t i = begin; i < end; ++i) {
      const std::string& value = values[i - begin];
      HW_RETURN_IF_ERROR(TakeStoredPage(keys[i], std::as_bytes(std::span<const char>(value)),
                                        bytes.subspan(i * page_bytes, page_bytes))
                             .status());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RemoteCopies::GetState(const std::string& copy, int64_t bytes,
                                                   uint32_t crc32c) {
  const auto want = static_cast<size_t>(std::max<int64_t>(0, bytes));
  std::string state;
  for (size_t chunk = 0; chunk * kChunkBytes < want; ++chunk) {
    const std::string field = ChunkField(chunk);
    std::vector<std::string> values;
    HW_RETURN_IF_ERROR(pool_.Run([&](RedisConnection& redis) {
      return Fetch(redis, NameOf(copy), {&field, 1}, &values);
    }));
    state += values[0];
  }
  const uint32_t crc = Crc32c(std::as_bytes(std::span<const char>(state)));
  if (state.size() == want && crc == crc32c) return state;
  return absl::DataLossError(absl::StrCat("the state in copy ", copy, " has ", state.size(),
                                          " bytes of checksum ", crc, ", want ", want, " of ",
                                          crc32c));
}

absl::Status RemoteCopies::Erase(const std::string& copy) {
  return pool_.Run([&](RedisConnection& redis) -> absl::Status {
    HW_RETURN_IF_ERROR(redis.Send({"UNLINK", NameOf(copy)}));
    HW_ASSIGN_OR_RETURN(const RedisConnection::Reply reply, redis.Receive());
    return FromReply(*reply);
  });
}

}  // namespace heavywater
