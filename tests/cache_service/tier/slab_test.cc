#include "cache_service/tier/slab.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/slab_view.h"
#include "cache_service/tier/stale_slabs.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

std::string UniqueName() {
  static int count = 0;
  return absl::StrCat("heavywater-test-", getpid(), "-", ++count);
}

TEST(SlabTest, ARankSeesTheBytesThatTheOwnerSees) {
  auto slab = Slab::Create(UniqueName(), 1 << 20);
  ASSERT_TRUE(slab.ok()) << slab.status();
  const auto offset = (*slab)->Allocate(10000);
  ASSERT_TRUE(offset.ok());
  auto view =
      SlabView::Map((*slab)->name(), (*slab)->object_bytes(), (*slab)->nonce(), kSlabFormatVersion);
  ASSERT_TRUE(view.ok()) << view.status();
  std::memset((*view)->At(*offset, 10000), 0x5a, 10000);
  EXPECT_EQ(static_cast<int>((*slab)->At(*offset)[9999]), 0x5a);
}

TEST(SlabTest, FreeAndUsedBalanceAndUnitsAreRoundedUp) {
  auto slab = Slab::Create("", 1 << 20);
  ASSERT_TRUE(slab.ok());
  EXPECT_EQ((*slab)->total_bytes(), 1 << 20);
  const auto offset = (*slab)->Allocate(kSlabUnitBytes + 1);
  ASSERT_TRUE(offset.ok());
  EXPECT_EQ((*slab)->used_bytes(), 2 * kSlabUnitBytes);
  EXPECT_EQ((*slab)->used_bytes() + (*slab)->free_bytes(), (*slab)->total_bytes());
  (*slab)->Free(*offset, kSlabUnitBytes + 1);
  EXPECT_EQ((*slab)->used_bytes(), 0);
}

TEST(SlabTest, AFullSlabNamesNeedFreeAndLimit) {
  auto slab = Slab::Create("", 4 * kSlabUnitBytes);
  ASSERT_TRUE(slab.ok());
  const auto offset = (*slab)->Allocate(5 * kSlabUnitBytes);
  EXPECT_EQ(offset.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(offset.status().message()), HasSubstr("need 20480 bytes"));
  EXPECT_THAT(std::string(offset.status().message()), HasSubstr("16384 are free of 16384"));
}

TEST(SlabTest, ASecondSlabOfTheSameNameIsRefused) {
  const std::string name = UniqueName();
  auto first = Slab::Create(name, 1 << 16);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Slab::Create(name, 1 << 16).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST(SlabTest, TheNameIsGoneWithItsOwnerButMappedPagesStayValid) {
  const std::string name = UniqueName();
  auto slab = Slab::Create(name, 1 << 16);
  ASSERT_TRUE(slab.ok());
  const int64_t bytes = (*slab)->object_bytes();
  const uint64_t nonce = (*slab)->nonce();
  auto view = SlabView::Map(name, bytes, nonce, kSlabFormatVersion);
  ASSERT_TRUE(view.ok());
  slab->reset();
  EXPECT_EQ(SlabView::Map(name, bytes, nonce, kSlabFormatVersion).status().code(),
            absl::StatusCode::kNotFound);
  std::memset((*view)->At(kSlabUnitBytes, 64), 1, 64);  // must not fault
}

TEST(SlabTest, OnlySlabsWhoseOwnerWasKilledAreStale) {
  const std::string name = UniqueName();
  const pid_t owner = fork();
  if (owner == 0) {
    auto slab = Slab::Create(name, 1 << 16);
    _exit(slab.ok() ? 0 : 1);  // without its destructor, as if killed
  }
  int status = 0;
  ASSERT_EQ(waitpid(owner, &status, 0), owner);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(Slab::Create(name, 1 << 16).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(RemoveStaleSlabs(name), 1);
  auto slab = Slab::Create(name, 1 << 16);
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_EQ(RemoveStaleSlabs(name), 0) << "its owner lives";
}

TEST(SlabTest, AnUnfinishedSlabIsRemovedByItsOwnersSuccessorOnly) {
  const std::string name = UniqueName();
  const int fd = shm_open(("/" + name).c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  EXPECT_FALSE(RemoveStaleSlab(name, /*unfinished_too=*/true)) << "its owner is making it";
  EXPECT_EQ(flock(fd, LOCK_UN), 0);
  EXPECT_FALSE(RemoveStaleSlab(name));
  ASSERT_EQ(ftruncate(fd, 3 * kSlabUnitBytes), 0);
  EXPECT_TRUE(RemoveStaleSlab(name, /*unfinished_too=*/true));
  close(fd);
  EXPECT_TRUE(Slab::Create(name, 1 << 16).ok());
}

TEST(SlabTest, MoreMemoryThanTheSystemHasIsAnErrorAndNotAFault) {
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) != 0 || shm.f_blocks == 0) {
    GTEST_SKIP() << "/dev/shm has no limit here: the attempt would take all memory";
  }
  // Sparse at first: only taking the memory can fail.
  auto slab = Slab::Create(UniqueName(), int64_t{1} << 45);
  if (!slab.ok()) GTEST_SKIP() << "this system refuses the object itself: " << slab.status();
  const auto offset = (*slab)->Allocate(int64_t{1} << 44);
  EXPECT_EQ(offset.status().code(), absl::StatusCode::kResourceExhausted) << offset.status();
  EXPECT_EQ((*slab)->used_bytes(), 0);
}

class SlabViewTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto slab = Slab::Create(UniqueName(), 1 << 16);
    ASSERT_TRUE(slab.ok()) << slab.status();
    slab_ = *std::move(slab);
  }
  absl::StatusOr<std::unique_ptr<SlabView>> Map(int64_t more_bytes, uint64_t more_nonce,
                                                int more_version) {
    return SlabView::Map(slab_->name(), slab_->object_bytes() + more_bytes,
                         slab_->nonce() + more_nonce, kSlabFormatVersion + more_version);
  }
  std::unique_ptr<Slab> slab_;
};

TEST_F(SlabViewTest, AnotherSizeNonceOrVersionIsRefusedNamingBoth) {
  ASSERT_TRUE(Map(0, 0, 0).ok());
  EXPECT_EQ(Map(4096, 0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Map(4096, 0, 0).status().message()), HasSubstr("bytes, want"));
  EXPECT_EQ(Map(0, 1, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Map(0, 1, 0).status().message()), HasSubstr("nonce"));
  EXPECT_EQ(Map(0, 0, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Map(0, 0, 1).status().message()), HasSubstr("format_version"));
}

TEST_F(SlabViewTest, OffsetsOutsideThePagesAreNull) {
  auto view = Map(0, 0, 0);
  ASSERT_TRUE(view.ok());
  const int64_t end = (*view)->bytes();
  EXPECT_NE((*view)->At(kSlabUnitBytes, 10), nullptr);
  EXPECT_NE((*view)->At(end - 10, 10), nullptr);
  EXPECT_EQ((*view)->At(0, 10), nullptr) << "the header is not a page";
  EXPECT_EQ((*view)->At(-1, 10), nullptr);
  EXPECT_EQ((*view)->At(end - 9, 10), nullptr);
  EXPECT_EQ((*view)->At(kSlabUnitBytes, int64_t{1} << 62), nullptr);
  EXPECT_EQ((*view)->Watermark(kSlabUnitBytes + 8), nullptr);
}

TEST_F(SlabViewTest, WhatWasWrittenBelowAPublishedWatermarkIsVisible) {
  auto view = Map(0, 0, 0);
  ASSERT_TRUE(view.ok());
  const auto cell = slab_->Allocate(kSlabUnitBytes);
  const auto page = slab_->Allocate(kSlabUnitBytes);
  ASSERT_TRUE(cell.ok() && page.ok());
  slab_->Watermark(*cell).store(0);
  std::thread rank([&] {
    auto* rows = reinterpret_cast<int32_t*>((*view)->At(*page, kSlabUnitBytes));
    for (int32_t token = 0; token < 1024; ++token) {
      rows[token] = token + 1;
      PublishWatermark(*(*view)->Watermark(*cell), token + 1);
    }
  });
  const auto* rows = reinterpret_cast<const int32_t*>(slab_->At(*page));
  int64_t seen = 0;
  while (seen < 1024) {
    seen = slab_->Watermark(*cell).load(std::memory_order_acquire);
    if (seen == 0) continue;
    ASSERT_EQ(rows[seen - 1], seen);
  }
  rank.join();
  PublishWatermark(slab_->Watermark(*cell), 5);
  EXPECT_EQ(slab_->Watermark(*cell).load(), 1024) << "a watermark never goes back";
}

}  // namespace
}  // namespace heavywater
