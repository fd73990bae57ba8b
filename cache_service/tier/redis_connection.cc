#include "cache_service/tier/redis_connection.h"

#include <sys/time.h>

#include <array>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr size_t kMaxPasswordBytes = 4096;

// Its first line; its text is in no error.
absl::StatusOr<std::string> ReadPassword(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line) || line.size() > kMaxPasswordBytes) {
    return absl::InvalidArgumentError(absl::StrCat("redis_password_file ", path,
                                                   " cannot be read, or has no line of 1 to ",
                                                   kMaxPasswordBytes, " bytes"));
  }
  absl::StripTrailingAsciiWhitespace(&line);
  if (!line.empty()) return line;
  return absl::InvalidArgumentError(
      absl::StrCat("redis_password_file ", path, " begins with an empty line, want a password"));
}

}  // namespace

absl::Status FromReply(const redisReply& reply) {
  if (reply.type != REDIS_REPLY_ERROR) return absl::OkStatus();
  const std::string text = absl::StrCat("redis: ", std::string(reply.str, reply.len));
  if (absl::StartsWith(absl::string_view(reply.str, reply.len), "OOM")) {
    return absl::ResourceExhaustedError(text);
  }
  return absl::FailedPreconditionError(text);
}

absl::Status CheckRedisEndpoint(const RedisEndpoint& endpoint) {
  HW_RETURN_IF_ERROR(RedisTls::Check(endpoint.tls));
  if (endpoint.password_file.empty()) {
    if (endpoint.username.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "redis_username is set and redis_password_file is not, want both or no name");
  }
  return ReadPassword(endpoint.password_file).status();
}

absl::StatusOr<std::unique_ptr<RedisConnection>> RedisConnection::Connect(
    const RedisEndpoint& endpoint) {
  const timeval limit = absl::ToTimeval(endpoint.timeout);
  std::unique_ptr<RedisConnection> connection(
      new RedisConnection(redisConnectWithTimeout(endpoint.host.c_str(), endpoint.port, limit),
                          absl::StrCat(endpoint.host, ":", endpoint.port)));
  redisContext* const context = connection->context_.get();
  if (context == nullptr || context->err != 0 || redisSetTimeout(context, limit) != REDIS_OK) {
    return connection->Broken();
  }
  if (!endpoint.tls.ca_file.empty()) {
    auto tls = RedisTls::Start(endpoint.tls, endpoint.host, context->fd);
    if (!tls.ok()) return connection->Broken(tls.status().message());
    connection->tls_ = *std::move(tls);
  }
  if (!endpoint.password_file.empty()) HW_RETURN_IF_ERROR(connection->Authenticate(endpoint));
  return connection;
}

absl::Status RedisConnection::Authenticate(const RedisEndpoint& endpoint) {
  const absl::StatusOr<std::string> password = ReadPassword(endpoint.password_file);
  if (!password.ok()) return Broken(password.status().message());
  std::vector<std::string_view> command = {"AUTH"};
  if (!endpoint.username.empty()) command.push_back(endpoint.username);
  command.push_back(*password);
  HW_RETURN_IF_ERROR(Send(command));
  HW_ASSIGN_OR_RETURN(const Reply reply, Receive());
  if (reply->type != REDIS_REPLY_ERROR) return absl::OkStatus();
  // Its code alone: the rest may repeat what it was sent.
  const absl::string_view text(reply->str, reply->len);
  return Broken(absl::StrCat(
      "it refuses user \"", endpoint.username.empty() ? "default" : endpoint.username,
      "\" with the password of redis_password_file: ", text.substr(0, text.find(' '))));
}

absl::Status RedisConnection::Broken() const {
  return Broken(context_ == nullptr ? "no memory" : static_cast<const char*>(context_->errstr));
}

absl::Status RedisConnection::Broken(absl::string_view reason) const {
  return absl::UnavailableError(absl::StrCat("redis at ", address_, ": ", reason));
}

absl::Status RedisConnection::Send(const std::vector<std::string_view>& arguments) {
  std::vector<const char*> data;
  std::vector<size_t> bytes;
  for (const std::string_view argument : arguments) {
    data.push_back(argument.data());
    bytes.push_back(argument.size());
  }
  if (tls_ == nullptr) {
    const int sent = redisAppendCommandArgv(context_.get(), static_cast<int>(data.size()),
                                            data.data(), bytes.data());
    return sent == REDIS_OK ? absl::OkStatus() : Broken();
  }
  char* command = nullptr;
  const int size =
      redisFormatCommandArgv(&command, static_cast<int>(data.size()), data.data(), bytes.data());
  if (size < 0) return Broken("no memory");
  unsent_.append(command, static_cast<size_t>(size));
  redisFreeCommand(command);
  return absl::OkStatus();
}

absl::StatusOr<RedisConnection::Reply> RedisConnection::Receive() {
  if (tls_ != nullptr) return ReceiveOverTls();
  void* reply = nullptr;
  if (redisGetReply(context_.get(), &reply) != REDIS_OK || reply == nullptr) return Broken();
  return Reply(static_cast<redisReply*>(reply));
}

absl::StatusOr<RedisConnection::Reply> RedisConnection::ReceiveOverTls() {
  const absl::Status sent = tls_->Write(std::exchange(unsent_, {}));
  if (!sent.ok()) return Broken(sent.message());
  std::array<char, 16 << 10> chunk;
  while (true) {
    void* reply = nullptr;
    if (redisReaderGetReply(context_->reader, &reply) != REDIS_OK) {
      return Broken(static_cast<const char*>(context_->reader->errstr));
    }
    if (reply != nullptr) return Reply(static_cast<redisReply*>(reply));
    const absl::StatusOr<size_t> read = tls_->Read(chunk);
    if (!read.ok()) return Broken(read.status().message());
    if (redisReaderFeed(context_->reader, chunk.data(), *read) != REDIS_OK) {
      return Broken(static_cast<const char*>(context_->reader->errstr));
    }
  }
}

}  // namespace heavywater
