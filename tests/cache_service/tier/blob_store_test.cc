#include "cache_service/tier/blob_store.h"

#include <gmock/gmock.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/ordered_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/tier/fake_tier.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

std::string BytesOf(int seed, int64_t size) {
  std::minstd_rand random(seed + 1);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

class BlobStoreTest : public ::testing::Test {
 protected:
  // `disk_bytes` 0: no tier below host memory.
  void Make(int64_t host_bytes, int64_t max_bytes, int64_t disk_bytes = 0,
            int64_t max_blobs = 1000) {
    std::vector<std::unique_ptr<LowerTier>> below;
    if (disk_bytes > 0) {
      auto disk = std::make_unique<FakeTier>("disk", disk_bytes);
      disk_ = disk.get();
      below.push_back(std::move(disk));
    }
    store_ = std::make_unique<OrderedPageStore>(
        std::make_unique<HostPageStore>(*Slab::Create("", host_bytes)), std::move(below),
        OrderedStoreOptions{}, clock_);
    blobs_ = std::make_unique<BlobStore>(
        *store_, BlobStoreOptions{.max_bytes = max_bytes, .max_blobs = max_blobs});
  }

  absl::Status Put(const BlobKey& key, const std::string& bytes) {
    auto writer = blobs_->Begin(key, static_cast<int64_t>(bytes.size()));
    if (!writer.ok()) return writer.status();
    for (size_t first = 0; first < bytes.size(); first += 100'000) {
      const absl::Status status =
          (*writer)->Append(AsBytes(std::string_view(bytes).substr(first, 100'000)));
      if (!status.ok()) return status;
    }
    return (*writer)->Commit();
  }

  absl::StatusOr<std::string> Get(const BlobKey& key) {
    const auto blob = blobs_->Find(key);
    if (!blob.ok()) return blob.status();
    std::string bytes;
    for (int64_t page = 0; page < blob->num_pages(); ++page) {
      std::string part;
      const absl::Status status = blobs_->ReadPage(*blob, page, &part);
      if (!status.ok()) return status;
      bytes += part;
    }
    return bytes;
  }

  FakeClock clock_;
  FakeTier* disk_ = nullptr;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<BlobStore> blobs_;
};

TEST_F(BlobStoreTest, ValuesOfAnySizeComeBackByteForByte) {
  Make(64 * kMiB, 64 * kMiB);
  const int64_t sizes[] = {1, 4095, 4096, 4097, kMiB - 1, kMiB, kMiB + 1, 5 * kMiB + 12345};
  for (const int64_t size : sizes) {
    const std::string bytes = BytesOf(static_cast<int>(size), size);
    ASSERT_TRUE(Put({"space", absl::StrCat(size)}, bytes).ok()) << size;
  }
  for (const int64_t size : sizes) {
    EXPECT_EQ(*Get({"space", absl::StrCat(size)}), BytesOf(static_cast<int>(size), size)) << size;
  }
  EXPECT_TRUE(absl::IsNotFound(Get({"other space", "1"}).status()));
}

TEST_F(BlobStoreTest, NothingIsThereBeforeCommitNorStaysWithoutIt) {
  Make(8 * kMiB, 8 * kMiB);
  const int64_t free = store_->Stats().free_bytes;
  {
    auto writer = blobs_->Begin({"space", "key"}, 2 * kMiB);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE((*writer)->Append(AsBytes(BytesOf(1, kMiB + 1))).ok());
    EXPECT_FALSE(blobs_->Has({"space", "key"}));
    EXPECT_EQ((*writer)->missing_bytes(), kMiB - 1);
    EXPECT_TRUE(absl::IsInvalidArgument((*writer)->Append(AsBytes(BytesOf(1, kMiB)))));
  }
  EXPECT_EQ(store_->Stats().free_bytes, free);
  EXPECT_EQ(blobs_->Stats().held_bytes, 0);
}

TEST_F(BlobStoreTest, AValueThatIsThereIsNotReplaced) {
  Make(8 * kMiB, 8 * kMiB);
  ASSERT_TRUE(Put({"space", "key"}, "first").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Put({"space", "key"}, "other")));
  const absl::Status longer = Put({"space", "key"}, "longer");
  EXPECT_TRUE(absl::IsFailedPrecondition(longer));
  EXPECT_THAT(longer.message(), HasSubstr("total_bytes is 6, but the key's value has 5"));
  EXPECT_EQ(*Get({"space", "key"}), "first");
}

TEST_F(BlobStoreTest, OfTwoThatWriteTheSameKeyOneCopyStays) {
  Make(8 * kMiB, 8 * kMiB);
  auto one = blobs_->Begin({"space", "key"}, 5);
  auto two = blobs_->Begin({"space", "key"}, 5);
  ASSERT_TRUE(one.ok() && two.ok());
  for (auto* writer : {&*one, &*two}) {
    ASSERT_TRUE((*writer)->Append(AsBytes("value")).ok());
    ASSERT_TRUE((*writer)->Commit().ok());
  }
  one->reset();
  two->reset();
  EXPECT_EQ(*Get({"space", "key"}), "value");
  EXPECT_EQ(blobs_->Stats().blobs, 1);
  EXPECT_EQ(store_->Stats().used_bytes, 2 * 4096);  // a page and its watermark
}

TEST_F(BlobStoreTest, TheLongestUnusedGoWhenTheLimitIsReached) {
  Make(16 * kMiB, 3 * (kMiB + 4096));
  for (const char* key : {"a", "b", "c"})
    ASSERT_TRUE(Put({"space", key}, BytesOf(*key, kMiB)).ok());
  ASSERT_TRUE(blobs_->Has({"space", "a"}));  // a use
  ASSERT_TRUE(Put({"space", "d"}, BytesOf('d', kMiB)).ok());
  EXPECT_FALSE(blobs_->Has({"space", "b"}));
  for (const char* key : {"a", "c", "d"}) EXPECT_EQ(*Get({"space", key}), BytesOf(*key, kMiB));
  EXPECT_EQ(blobs_->Stats().dropped, 1);
  const absl::Status large = Put({"space", "e"}, BytesOf('e', 4 * kMiB));
  EXPECT_TRUE(absl::IsResourceExhausted(large));
  EXPECT_EQ(blobs_->Stats().blobs, 3) << "what can never fit drops nothing";
}

TEST_F(BlobStoreTest, TheirNumberIsBoundedToo) {
  Make(16 * kMiB, 16 * kMiB, 0, /*max_blobs=*/2);
  for (const char* key : {"a", "b", "c"}) ASSERT_TRUE(Put({"space", key}, "x").ok());
  EXPECT_FALSE(blobs_->Has({"space", "a"}));
  EXPECT_EQ(blobs_->Stats().blobs, 2);
}

TEST_F(BlobStoreTest, WithoutALimitNothingIsTaken) {
  Make(kMiB, 0);
  const absl::Status status = Put({"space", "key"}, "value");
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(status.message(), HasSubstr("blob_bytes is 0"));
}

TEST_F(BlobStoreTest, InAFullSlabOnlyValuesMakeRoomAndOnlyAsFarAsThatHelps) {
  Make(4 * kMiB, 64 * kMiB);
  // A sequence of a worker holds 2 MiB.
  const SequenceSpec spec = {
      .sequence = 7,
      .geometry = {.num_layers = 1, .num_kv_heads = 1, .page_tokens = 256, .row_bytes = 4096},
      .max_tokens = 512,
      .prompt_tokens = 512};
  ASSERT_TRUE(store_->Open(spec).ok());
  ASSERT_TRUE(Put({"space", "a"}, BytesOf(1, kMiB)).ok());
  ASSERT_TRUE(Put({"space", "b"}, BytesOf(2, kMiB - 4 * 4096)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Put({"space", "c"}, BytesOf(3, 3 * kMiB))));
  EXPECT_EQ(blobs_->Stats().blobs, 2) << "all of them together are less than what is missing";
  ASSERT_TRUE(Put({"space", "d"}, BytesOf(4, kMiB)).ok());
  EXPECT_FALSE(blobs_->Has({"space", "a"}));
  EXPECT_TRUE(blobs_->Has({"space", "b"}));
  EXPECT_EQ(blobs_->Stats().refused, 1);
  EXPECT_TRUE(store_->Reserve({.sequence = 7, .heads = {0, 1}, .num_pages = 2}, false).ok());
}

TEST_F(BlobStoreTest, ValuesGoDownToTheNextTierAndAreReadFromThere) {
  Make(3 * kMiB, 64 * kMiB, /*disk_bytes=*/32 * kMiB);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Put({"space", absl::StrCat(i)}, BytesOf(i, kMiB)).ok());
  EXPECT_EQ(blobs_->Stats().blobs, 10);
  EXPECT_EQ(blobs_->TierOf(*blobs_->Find({"space", "0"}), 0), 1);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(*Get({"space", absl::StrCat(i)}), BytesOf(i, kMiB)) << i;
}

TEST_F(BlobStoreTest, WhenAllTiersAreFullTheLongestUnusedGo) {
  Make(3 * kMiB, 64 * kMiB, /*disk_bytes=*/4 * kMiB + 4096);
  for (int i = 0; i < 20; ++i) {
    const absl::Status status = Put({"space", absl::StrCat(i)}, BytesOf(i, kMiB));
    ASSERT_TRUE(status.ok()) << i << ": " << status;
    while (store_->Turn()) {
    }
  }
  EXPECT_FALSE(blobs_->Has({"space", "0"}));
  EXPECT_GE(blobs_->Stats().blobs, 4);
  EXPECT_EQ(*Get({"space", "19"}), BytesOf(19, kMiB));
}

TEST_F(BlobStoreTest, WhatATierHasLostIsDroppedOnce) {
  Make(3 * kMiB, 64 * kMiB, /*disk_bytes=*/32 * kMiB);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Put({"space", absl::StrCat(i)}, BytesOf(i, kMiB)).ok());
  const auto blob = blobs_->Find({"space", "0"});
  ASSERT_TRUE(blob.ok());
  ASSERT_TRUE(disk_->Lose({blob->sequence, 0x626f6c62, 0, 0, 0}));
  std::string bytes;
  EXPECT_TRUE(absl::IsNotFound(blobs_->ReadPage(*blob, 0, &bytes)));
  blobs_->DropLost({"space", "0"}, *blob);
  EXPECT_FALSE(blobs_->Has({"space", "0"}));
  ASSERT_TRUE(Put({"space", "0"}, BytesOf(0, kMiB)).ok());
  blobs_->DropLost({"space", "0"}, *blob);
  EXPECT_TRUE(blobs_->Has({"space", "0"})) << "it is new since";
}

TEST_F(BlobStoreTest, BytesThatHaveChangedInMemoryAreFoundAlsoInAPageThatIsNotFull) {
  Make(2 * kMiB, 2 * kMiB);
  const std::string value = BytesOf(5, 1000);
  ASSERT_TRUE(Put({"space", "key"}, value).ok());
  Slab& slab = store_->slab();
  char* const memory = reinterpret_cast<char*>(slab.At(0));
  const std::string_view all(memory, slab.object_bytes());
  const size_t at = all.find(value);
  ASSERT_NE(at, std::string_view::npos);
  memory[at + 17] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(Get({"space", "key"}).status()));
}

TEST_F(BlobStoreTest, ErasedValuesGiveTheirRoomBack) {
  Make(8 * kMiB, 8 * kMiB);
  const int64_t free = store_->Stats().free_bytes;
  for (const char* key : {"a", "b", "c"}) ASSERT_TRUE(Put({"one", key}, BytesOf(*key, kMiB)).ok());
  ASSERT_TRUE(Put({"two", "a"}, "x").ok());
  EXPECT_TRUE(blobs_->Erase({"one", "a"}));
  EXPECT_FALSE(blobs_->Erase({"one", "a"}));
  EXPECT_EQ(blobs_->EraseSpace("one"), 2);
  EXPECT_EQ(*Get({"two", "a"}), "x");
  EXPECT_EQ(blobs_->EraseSpace("two"), 1);
  EXPECT_EQ(store_->Stats().free_bytes, free);
  EXPECT_EQ(blobs_->Stats().held_bytes, 0);
}

}  // namespace
}  // namespace heavywater
