// BlobService over a real channel.
#include "cache_service/server/blob_service.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/runtime/grpc_status.h"
#include "tests/cache_service/server/cache_service_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

uint32_t Crc(const std::string& bytes) {
  return Crc32c(std::as_bytes(std::span<const char>(bytes)));
}

class BlobServiceTest : public CacheServiceFixture {
 protected:
  void SetUp() override {
    config_.set_host_bytes(8 * kMiB);
    config_.set_blob_bytes(8 * kMiB);
    RestartWithBlobs();
  }
  void RestartWithBlobs() {
    Restart();
    blobs_ = v1::BlobService::NewStub(channel_);
  }

  struct Value {
    std::string key;
    std::string bytes;
  };
  static std::vector<v1::PutBlobsRequest> ChunksOf(const Value& value) {
    std::vector<v1::PutBlobsRequest> chunks;
    for (size_t first = 0; first < value.bytes.size(); first += kMiB) {
      v1::PutBlobsRequest& chunk = chunks.emplace_back();
      chunk.set_data(value.bytes.substr(first, kMiB));
      chunk.set_crc32c(Crc(chunk.data()));
    }
    chunks.front().set_space("space");
    chunks.front().set_key(value.key);
    chunks.front().set_total_bytes(static_cast<int64_t>(value.bytes.size()));
    return chunks;
  }
  absl::StatusOr<v1::PutBlobsResponse> Put(const std::vector<v1::PutBlobsRequest>& chunks) {
    grpc::ClientContext context;
    v1::PutBlobsResponse response;
    const auto stream = blobs_->Put(&context, &response);
    for (const v1::PutBlobsRequest& chunk : chunks) {
      if (!stream->Write(chunk)) break;
    }
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }
  absl::StatusOr<v1::PutBlobsResponse> PutAll(const std::vector<Value>& values) {
    std::vector<v1::PutBlobsRequest> chunks;
    for (const Value& value : values) {
      for (const v1::PutBlobsRequest& chunk : ChunksOf(value)) chunks.push_back(chunk);
    }
    return Put(chunks);
  }
  // "-" for those that are missing.
  absl::StatusOr<std::vector<std::string>> Get(const std::vector<std::string>& keys) {
    v1::GetBlobsRequest request;
    request.set_space("space");
    for (const std::string& key : keys) request.add_keys(key);
    std::vector<std::string> values(keys.size());
    grpc::ClientContext context;
    const auto stream = blobs_->Get(&context, request);
    v1::GetBlobsResponse chunk;
    while (stream->Read(&chunk)) {
      std::string& value = values.at(chunk.index());
      EXPECT_EQ(Crc(chunk.data()), chunk.crc32c());
      EXPECT_EQ(chunk.offset(), static_cast<int64_t>(value.size()));
      value = chunk.missing() ? "-" : value + chunk.data();
    }
    const grpc::Status status = stream->Finish();
    if (!status.ok()) return FromGrpcStatus(status);
    return values;
  }
  absl::StatusOr<std::vector<bool>> Has(const std::vector<std::string>& keys) {
    v1::HasBlobsRequest request;
    request.set_space("space");
    for (const std::string& key : keys) request.add_keys(key);
    v1::HasBlobsResponse response;
    grpc::ClientContext context;
    const grpc::Status status = blobs_->Has(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return std::vector<bool>(response.present().begin(), response.present().end());
  }
  v1::StatsResponse Stats() {
    v1::StatsResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(admin_->Stats(&context, {}, &response).ok());
    return response;
  }

  std::unique_ptr<v1::BlobService::Stub> blobs_;
};

std::string Letters(char letter, int64_t size) { return std::string(size, letter); }

TEST_F(BlobServiceTest, ValuesArePutAndGotManyAtATime) {
  const std::vector<Value> values = {
      {"a", Letters('a', 3)}, {"b", Letters('b', 2 * kMiB + 7)}, {"c", Letters('c', kMiB)}};
  const auto put = PutAll(values);
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_THAT(put->stored(), ElementsAre(true, true, true));
  EXPECT_EQ(*Has({"c", "x", "a"}), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(*Get({"b", "x", "a", "c"}),
            (std::vector<std::string>{values[1].bytes, "-", values[0].bytes, values[2].bytes}));
  EXPECT_EQ(Stats().blobs(), 3);
  EXPECT_GE(Stats().blob_bytes(), 3 * kMiB);
}

TEST_F(BlobServiceTest, WhatFindsNoRoomIsNotStoredAndTheOthersAre) {
  const auto put = PutAll(
      {{"a", Letters('a', kMiB)}, {"large", Letters('l', 9 * kMiB)}, {"c", Letters('c', kMiB)}});
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_THAT(put->stored(), ElementsAre(true, false, true));
  EXPECT_THAT(put->refused_because(), HasSubstr("blob_bytes"));
  EXPECT_EQ(*Has({"a", "large", "c"}), (std::vector<bool>{true, false, true}));
}

TEST_F(BlobServiceTest, AValueThatIsThereIsPassedOver) {
  ASSERT_TRUE(PutAll({{"a", Letters('a', kMiB + 1)}}).ok());
  const auto again = PutAll({{"a", Letters('a', kMiB + 1)}, {"b", "x"}});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_THAT(again->stored(), ElementsAre(true, true));
  const auto other_size = PutAll({{"b", "xy"}});
  EXPECT_TRUE(absl::IsFailedPrecondition(other_size.status())) << other_size.status();
}

TEST_F(BlobServiceTest, ABrokenStreamLeavesWhatWasWholeAndNothingElse) {
  auto chunks = ChunksOf({"whole", Letters('w', 5)});
  for (const auto& chunk : ChunksOf({"half", Letters('h', kMiB + 5)})) chunks.push_back(chunk);
  chunks.back().set_crc32c(1);
  EXPECT_TRUE(absl::IsDataLoss(Put(chunks).status()));
  EXPECT_EQ(*Has({"whole", "half"}), (std::vector<bool>{true, false}));
  chunks.pop_back();
  const auto ended = Put(chunks);
  EXPECT_TRUE(absl::IsInvalidArgument(ended.status()));
  EXPECT_THAT(ended.status().message(), HasSubstr("5 bytes of its last value missing"));
  EXPECT_EQ(Stats().blobs(), 1);
  EXPECT_EQ(Stats().blob_bytes(), 2 * 4096);
}

TEST_F(BlobServiceTest, WrongRequestsAreRefusedNamingTheField) {
  const auto refused = [&](const char* field, auto change) {
    auto chunks = ChunksOf({"key", Letters('k', kMiB + 5)});
    change(chunks);
    const absl::Status status = Put(chunks).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field << ": " << status;
    EXPECT_THAT(status.message(), HasSubstr(field));
  };
  refused("space", [](auto& chunks) { chunks[0].clear_space(); });
  refused("space", [](auto& chunks) { chunks[0].set_space(Letters('s', 257)); });
  refused("key", [](auto& chunks) { chunks[0].clear_key(); });
  refused("key", [](auto& chunks) { chunks[1].set_key("another"); });
  refused("total_bytes", [](auto& chunks) { chunks[0].set_total_bytes(0); });
  refused("total_bytes", [](auto& chunks) { chunks[0].set_total_bytes(kMaxBlobBytes + 1); });
  refused("data", [](auto& chunks) { chunks[0].set_total_bytes(kMiB + 1); });
  refused("data", [](auto& chunks) {
    chunks[1].set_data("");
    chunks[1].set_crc32c(0);
  });
  EXPECT_TRUE(absl::IsInvalidArgument(Has({}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Has({""}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Has(std::vector<std::string>(1025, "k")).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Get({}).status()));
  EXPECT_EQ(Stats().blob_bytes(), 0);
}

TEST_F(BlobServiceTest, WithoutBlobBytesNothingIsTakenAndNothingIsThere) {
  config_.set_blob_bytes(0);
  RestartWithBlobs();
  const auto put = PutAll({{"a", "x"}});
  EXPECT_TRUE(absl::IsFailedPrecondition(put.status()));
  EXPECT_THAT(put.status().message(), HasSubstr("blob_bytes is 0"));
  EXPECT_EQ(*Has({"a"}), std::vector<bool>{false});
}

TEST_F(BlobServiceTest, ErasedKeysAreGone) {
  ASSERT_TRUE(PutAll({{"a", "1"}, {"b", "2"}, {"c", "3"}}).ok());
  const auto erase = [&](const std::vector<std::string>& keys) {
    v1::EraseBlobsRequest request;
    request.set_space("space");
    for (const std::string& key : keys) request.add_keys(key);
    v1::EraseBlobsResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(blobs_->Erase(&context, request, &response).ok());
    return response.erased();
  };
  EXPECT_EQ(erase({"b", "x"}), 1);
  EXPECT_EQ(*Has({"a", "b", "c"}), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(erase({}), 2);
  EXPECT_EQ(Stats().blobs(), 0);
}

TEST_F(BlobServiceTest, ValuesThatWentToDiskAreGotFromThere) {
  const std::string folder = ::testing::TempDir() + "heavywater-blob-service-test";
  std::filesystem::remove_all(folder);
  config_.set_host_bytes(4 * kMiB);
  config_.set_blob_bytes(64 * kMiB);
  config_.set_disk_path(folder);
  config_.set_disk_bytes(64 * kMiB);
  auto server = CacheServer::Start(config_, clock_);
  if (absl::IsInvalidArgument(server.status())) GTEST_SKIP() << "a build without RocksDB";
  server->reset();
  RestartWithBlobs();
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (char letter = 'a'; letter < 'k'; ++letter) {
    keys.emplace_back(1, letter);
    values.push_back(Letters(letter, kMiB + 10));
    const auto put = PutAll({{keys.back(), values.back()}});
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_TRUE(put->stored(0)) << put->refused_because();
  }
  EXPECT_GT(Stats().tiers(1).pages(), 0);
  EXPECT_EQ(*Get(keys), values);
  server_.reset();
  std::filesystem::remove_all(folder);
}

TEST_F(BlobServiceTest, AValueThatStopsInItsMiddleIsGivenUpAfterAWhile) {
  const std::vector<v1::PutBlobsRequest> chunks = ChunksOf({"key", std::string(2 * kMiB, 'x')});
  const int64_t before = HostTier().used_bytes();
  grpc::ClientContext context;
  v1::PutBlobsResponse response;
  const auto stream = blobs_->Put(&context, &response);
  ASSERT_TRUE(stream->Write(chunks[0]));
  while (HostTier().used_bytes() == before) absl::SleepFor(absl::Milliseconds(1));
  server_->Tick();
  EXPECT_GT(HostTier().used_bytes(), before) << "not at once";
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (HostTier().used_bytes() != before && absl::Now() < deadline) {
    clock_.Advance(absl::Seconds(31));
    server_->Tick();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(HostTier().used_bytes(), before);
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("1048576 bytes of the value are missing"));
}

TEST_F(BlobServiceTest, AStreamThatWaitsBetweenValuesMayTakeItsTime) {
  grpc::ClientContext context;
  v1::PutBlobsResponse response;
  const auto stream = blobs_->Put(&context, &response);
  ASSERT_TRUE(stream->Write(ChunksOf({"one", "1"})[0]));
  v1::HasBlobsRequest has;
  has.set_space("space");
  has.add_keys("one");
  v1::HasBlobsResponse there;
  do {
    grpc::ClientContext asks;
    ASSERT_TRUE(blobs_->Has(&asks, has, &there).ok());
  } while (!there.present(0));
  clock_.Advance(absl::Hours(1));
  server_->Tick();
  ASSERT_TRUE(stream->Write(ChunksOf({"two", "2"})[0]));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_THAT(response.stored(), ElementsAre(true, true));
}

TEST_F(BlobServiceTest, AValueCountsForItsTenantAndOnlyThatTenantsValuesMakeRoom) {
  const auto put = [this](const std::string& key, const std::string& tenant) {
    auto chunks = ChunksOf({key, std::string(kMiB, 'x')});
    chunks[0].set_tenant(tenant);
    return Put(chunks);
  };
  v1::SetQuotaRequest quota;
  quota.set_request_id("quota");
  quota.set_tenant("acme");
  quota.mutable_quota()->set_host_bytes(2 * kMiB);
  grpc::ClientContext context;
  v1::SetQuotaResponse set;
  ASSERT_TRUE(admin_->SetQuota(&context, quota, &set).ok());
  ASSERT_TRUE(put("other", "other").ok());
  for (const char* key : {"a", "b", "c"}) {
    const auto stored = put(key, "acme");
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_THAT(stored->stored(), ElementsAre(true)) << stored->refused_because();
  }
  v1::HasBlobsRequest has;
  has.set_space("space");
  for (const char* key : {"other", "a", "b", "c"}) has.add_keys(key);
  v1::HasBlobsResponse there;
  grpc::ClientContext asks;
  ASSERT_TRUE(blobs_->Has(&asks, has, &there).ok());
  EXPECT_THAT(there.present(), ElementsAre(true, false, true, true));
}

}  // namespace
}  // namespace heavywater
