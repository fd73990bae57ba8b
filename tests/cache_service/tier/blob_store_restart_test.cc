// Values go on over a restart, with the pages that the host tier has taken over.
#include <gmock/gmock.h>
#include <unistd.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/blob_store.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/tier/memory_state.h"

namespace heavywater {
namespace {

using ::testing::IsEmpty;

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

class BlobStoreRestartTest : public ::testing::Test {
 protected:
  BlobStoreRestartTest() {
    static int count = 0;
    name_ = absl::StrCat("heavywater-blob-restart-test-", getpid(), "-", ++count);
    auto slab = Slab::Create(name_, 4 << 20);
    EXPECT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    nonce_ = (*slab)->nonce();
    object_bytes_ = (*slab)->object_bytes();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    blobs_ = std::make_unique<BlobStore>(*store_, Options(4 << 20), &state_);
  }
  ~BlobStoreRestartTest() override {
    blobs_.reset();
    store_.reset();
    RemoveStaleSlab(name_);
  }
  static BlobStoreOptions Options(int64_t max_bytes) {
    return {.max_bytes = max_bytes, .first_sequence = 100};
  }

  // The sequences that are nobody's.
  absl::StatusOr<std::vector<SequenceId>> Restart(int64_t max_bytes = 4 << 20) {
    blobs_.reset();
    store_.reset();
    auto slab = Slab::Adopt(name_, object_bytes_, nonce_);
    if (!slab.ok()) return slab.status();
    (*slab)->Keep();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    blobs_ = std::make_unique<BlobStore>(*store_, Options(max_bytes), &state_);
    const auto restored = store_->Restore();
    if (!restored.ok()) return restored.status();
    return blobs_->Restore(restored->live);
  }

  absl::Status Put(const BlobKey& key, const std::string& bytes) {
    auto writer = blobs_->Begin(key, static_cast<int64_t>(bytes.size()));
    if (!writer.ok()) return writer.status();
    const absl::Status status = (*writer)->Append(AsBytes(bytes));
    return status.ok() ? (*writer)->Commit() : status;
  }
  std::string Get(const BlobKey& key) {
    const auto blob = blobs_->Find(key);
    if (!blob.ok()) return "missing";
    std::string bytes;
    const absl::Status status = blobs_->ReadPage(*blob, 0, &bytes);
    return status.ok() ? bytes : std::string(status.message());
  }

  std::string name_;
  uint64_t nonce_ = 0;
  int64_t object_bytes_ = 0;
  MemoryState state_;
  std::unique_ptr<HostPageStore> store_;
  std::unique_ptr<BlobStore> blobs_;
};

const BlobKey kKey = {.space = "a space of some length", .key = std::string("\0key\xff", 5)};

TEST_F(BlobStoreRestartTest, WholeValuesGoOnAndTheOthersAreNobodys) {
  ASSERT_TRUE(Put(kKey, "value").ok());
  ASSERT_TRUE(Put({"space", "erased"}, "x").ok());
  ASSERT_TRUE(blobs_->Erase({"space", "erased"}));
  ASSERT_TRUE(store_
                  ->Open({.sequence = 7,
                          .geometry = {.num_layers = 1,
                                       .num_kv_heads = 1,
                                       .page_tokens = 1,
                                       .row_bytes = 4096},
                          .max_tokens = 1})
                  .ok());
  auto half = blobs_->Begin({"space", "half"}, 10'000);
  ASSERT_TRUE(half.ok());
  ASSERT_TRUE((*half)->Append(AsBytes(std::string(5'000, 'h'))).ok());
  const auto before_the_end = state_.Records();
  half->reset();  // a process that is killed does not get to this
  for (const auto& [key, value] : before_the_end) state_.Set(key, value);

  const auto others = Restart();
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_EQ(Get(kKey), "value");
  EXPECT_EQ(blobs_->Stats().blobs, 1);
  EXPECT_EQ(blobs_->Stats().held_bytes, 2 * 4096);
  EXPECT_EQ(others->size(), 2u) << "the sequence of a worker, and the half value";
  EXPECT_TRUE(absl::IsAlreadyExists(Put(kKey, "value")));
  ASSERT_TRUE(Put({"space", "new"}, "y").ok()) << "its number is none of the earlier ones";
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Get({"space", "new"}), "y");
}

TEST_F(BlobStoreRestartTest, UnderALowerLimitTheOldestGo) {
  for (const char* key : {"a", "b", "c"}) ASSERT_TRUE(Put({"space", key}, key).ok());
  const auto others = Restart(/*max_bytes=*/2 * 2 * 4096);
  ASSERT_TRUE(others.ok()) << others.status();
  EXPECT_THAT(*others, IsEmpty());
  EXPECT_FALSE(blobs_->Has({"space", "a"}));
  EXPECT_EQ(Get({"space", "b"}), "b");
  EXPECT_EQ(Get({"space", "c"}), "c");
  EXPECT_EQ(store_->Stats().used_bytes, 2 * 2 * 4096);
  ASSERT_TRUE(Restart(0).ok());
  EXPECT_EQ(blobs_->Stats().blobs, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

TEST_F(BlobStoreRestartTest, ADamagedRecordIsDataLossAndOneWithoutPagesIsForgotten) {
  ASSERT_TRUE(Put(kKey, "value").ok());
  const std::string key = StateKey(StateKind::kBlob, kBlobSequenceBit | 100);
  const auto records = state_.Records();
  ASSERT_TRUE(records.contains(key));
  state_.Set(StateKey(StateKind::kBlob, kBlobSequenceBit | 900), records.at(key));
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(Get(kKey), "value");
  EXPECT_FALSE(state_.Records().contains(StateKey(StateKind::kBlob, kBlobSequenceBit | 900)));
  std::string damaged = records.at(key);
  damaged[3] ^= 1;
  state_.Set(key, damaged);
  EXPECT_TRUE(absl::IsDataLoss(Restart().status()));
}

}  // namespace
}  // namespace heavywater
