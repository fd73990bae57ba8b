// Copies of sequences in a real Redis.
#include "cache_service/tier/remote_copies.h"

#include <gtest/gtest.h>

#include <cstring>

#include "absl/time/clock.h"
#include "cache_service/base/crc32c.h"
#include "tests/cache_service/tier/redis_server.h"

namespace heavywater {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr absl::Duration kTtl = absl::Minutes(1);

class RemoteCopiesTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    server_ = RedisServer::Start(&reason);
    if (server_ == nullptr) GTEST_SKIP() << reason;
    auto copies = RemoteCopies::Create(server_->address(), {}, Clock::Real());
    ASSERT_TRUE(copies.ok()) << copies.status();
    copies_ = *std::move(copies);
  }

  static PageKey KeyOf(int64_t page) { return {7, 99, 1, 2, page}; }
  static std::vector<std::byte> BytesOf(int64_t page) {
    std::vector<std::byte> bytes(kPageBytes);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(i * 31 + static_cast<size_t>(page) * 7);
    }
    return bytes;
  }
  absl::Status PutPages(const std::string& copy, int64_t count, absl::Duration ttl = kTtl) {
    std::vector<std::vector<std::byte>> memory;
    std::vector<PageCopy> pages;
    for (int64_t page = 0; page < count; ++page) memory.push_back(BytesOf(page));
    for (int64_t page = 0; page < count; ++page) {
      const auto& bytes = memory[static_cast<size_t>(page)];
      pages.push_back({KeyOf(page), bytes, Crc32c(bytes)});
    }
    return copies_->PutPages(copy, pages, ttl);
  }
  absl::StatusOr<std::vector<std::byte>> GetPages(const std::string& copy, int64_t count) {
    std::vector<PageKey> keys;
    for (int64_t page = 0; page < count; ++page) keys.push_back(KeyOf(page));
    std::vector<std::byte> bytes(keys.size() * kPageBytes);
    const absl::Status got = copies_->GetPages(copy, keys, bytes);
    if (!got.ok()) return got;
    return bytes;
  }
  absl::Status Command(const std::vector<std::string_view>& command) {
    auto redis = RedisConnection::Connect("127.0.0.1", server_->port(), absl::Seconds(1));
    if (!redis.ok()) return redis.status();
    absl::Status status = (*redis)->Send(command);
    if (status.ok()) status = (*redis)->Receive().status();
    return status;
  }

  std::unique_ptr<RedisServer> server_;
  std::unique_ptr<RemoteCopies> copies_;
};

TEST_F(RemoteCopiesTest, PagesComeBackInTheOrderInWhichTheyAreAskedFor) {
  // More than one exchange takes.
  constexpr int64_t kPages = 2100;
  ASSERT_TRUE(PutPages("one", kPages).ok());
  const auto bytes = GetPages("one", kPages);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  for (int64_t page = 0; page < kPages; ++page) {
    ASSERT_EQ(std::memcmp(bytes->data() + static_cast<size_t>(page) * kPageBytes,
                          BytesOf(page).data(), kPageBytes),
              0)
        << page;
  }
}

TEST_F(RemoteCopiesTest, AStateOfManyChunksComesBackAndADamagedOneIsRefused) {
  std::string state(2'500'000, 'x');
  for (size_t i = 0; i < state.size(); i += 1000) state[i] = static_cast<char>(i);
  const auto bytes = static_cast<int64_t>(state.size());
  const uint32_t crc = Crc32c(std::as_bytes(std::span<const char>(state)));
  ASSERT_TRUE(copies_->PutState("one", state, kTtl).ok());
  const auto got = copies_->GetState("one", bytes, crc);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, state);
  EXPECT_EQ(copies_->GetState("one", bytes, crc + 1).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(copies_->GetState("two", bytes, crc).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RemoteCopiesTest, APageThatIsMissingOrDamagedIsNeverOtherBytes) {
  ASSERT_TRUE(PutPages("one", 3).ok());
  EXPECT_EQ(GetPages("one", 4).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GetPages("two", 1).status().code(), absl::StatusCode::kNotFound);
  const std::vector<std::byte> bytes = BytesOf(1);
  const PageCopy wrong = {KeyOf(1), bytes, Crc32c(bytes) + 1};
  ASSERT_TRUE(copies_->PutPages("one", {&wrong, 1}, kTtl).ok());
  EXPECT_EQ(GetPages("one", 3).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RemoteCopiesTest, ACopyGoesAsAWholeByACallOrByItsTime) {
  ASSERT_TRUE(PutPages("erased", 3).ok());
  ASSERT_TRUE(PutPages("kept", 1).ok());
  ASSERT_TRUE(copies_->Erase("erased").ok());
  ASSERT_TRUE(copies_->Erase("erased").ok());
  EXPECT_EQ(GetPages("erased", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(GetPages("kept", 1).ok());
  ASSERT_TRUE(PutPages("brief", 3, absl::Milliseconds(100)).ok());
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(GetPages("brief", 1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RemoteCopiesTest, AFullRedisAndOneThatIsAwaySaySo) {
  ASSERT_TRUE(Command({"CONFIG", "SET", "maxmemory", "1"}).ok());
  EXPECT_EQ(PutPages("one", 1).code(), absl::StatusCode::kResourceExhausted);
  server_->Kill();
  EXPECT_EQ(PutPages("one", 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(GetPages("one", 1).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace heavywater
