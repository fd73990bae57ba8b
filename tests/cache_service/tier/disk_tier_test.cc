#include "cache_service/tier/disk_tier.h"

#include <gmock/gmock.h>
#include <rocksdb/db.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "tests/cache_service/tier/lower_tier_conformance.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr size_t kPageBytes = 64 << 10;

std::string NewFolder() {
  static int count = 0;
  const fs::path folder =
      fs::temp_directory_path() / absl::StrCat("heavywater-disk-test-", getpid(), "-", ++count);
  fs::remove_all(folder);
  return folder.string();
}

// Removes the folder after the tier has closed its files.
class TemporaryDiskTier final : public LowerTier {
 public:
  explicit TemporaryDiskTier(int64_t total_bytes) : folder_(NewFolder()) {
    auto opened = OpenDiskTier({.path = folder_, .total_bytes = total_bytes});
    EXPECT_TRUE(opened.ok()) << opened.status();
    tier_ = *std::move(opened);
  }
  ~TemporaryDiskTier() override {
    tier_.reset();
    fs::remove_all(folder_);
  }
  const char* name() const override { return tier_->name(); }
  std::vector<absl::Status> Put(std::span<const PageCopy> pages) override {
    return tier_->Put(pages);
  }
  absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) override {
    return tier_->Get(key, bytes);
  }
  absl::Status Erase(std::span<const PageKey> keys) override { return tier_->Erase(keys); }
  absl::Status EraseSequence(SequenceId id) override { return tier_->EraseSequence(id); }
  absl::Status Restore(std::span<const StoredPage> pages) override { return tier_->Restore(pages); }
  LowerTierStats Stats() const override { return tier_->Stats(); }

 private:
  const std::string folder_;
  std::unique_ptr<LowerTier> tier_;
};

INSTANTIATE_TEST_SUITE_P(Disk, LowerTierConformance,
                         ::testing::Values(LowerTierFactory{
                             "RocksDb",
                             [](int64_t total_bytes, std::string*) {
                               return std::make_unique<TemporaryDiskTier>(total_bytes);
                             }}),
                         [](const auto& info) { return info.param.name; });

class DiskTierTest : public ::testing::Test {
 protected:
  DiskTierTest() : folder_(NewFolder()) {}
  ~DiskTierTest() override {
    tier_.reset();
    fs::remove_all(folder_);
  }
  absl::Status Open(int64_t total_bytes = 16 << 20, bool keeps = false, bool restores = false) {
    tier_.reset();
    auto opened = OpenDiskTier(
        {.path = folder_, .total_bytes = total_bytes, .keeps = keeps, .restores = restores});
    if (opened.ok()) tier_ = *std::move(opened);
    return opened.status();
  }
  absl::Status Put(const PageKey& key) { return PutTestPage(*tier_, key, kPageBytes); }
  absl::StatusOr<std::vector<std::byte>> Get(const PageKey& key) {
    return GetPage(*tier_, key, kPageBytes);
  }
  // Enough that RocksDB's buffers in memory are written out to files.
  void PutMany(SequenceId sequence) {
    for (int64_t page = 0; page < 60; ++page) ASSERT_TRUE(Put(TestKey(sequence, page)).ok());
  }
  // Calls change(file, offset) for the file in which a page's bytes lie.
  template <typename Change>
  bool ChangeOnDisk(const PageKey& key, Change change) {
    const std::vector<std::byte> page = TestPage(key, kPageBytes);
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() != ".blob") continue;
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string bytes((std::istreambuf_iterator<char>(in)), {});
      const auto* const first = reinterpret_cast<const char*>(page.data());
      const auto found = std::search(bytes.begin(), bytes.end(), first, first + page.size());
      if (found == bytes.end()) continue;
      change(entry.path(), found - bytes.begin());
      return true;
    }
    return false;
  }
  void WriteForeign(const std::string& key, const std::string& value) {
    rocksdb::DB* db = nullptr;
    rocksdb::Options options;
    options.create_if_missing = true;
    ASSERT_TRUE(rocksdb::DB::Open(options, folder_, &db).ok());
    ASSERT_TRUE(db->Put({}, key, value).ok());
    delete db;
  }

  const std::string folder_;
  std::unique_ptr<LowerTier> tier_;
};

TEST_F(DiskTierTest, WhatAnEarlierProcessLeftIsErasedWhenItOpens) {
  ASSERT_TRUE(Open().ok());
  PutMany(1);
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(tier_->Stats().used_bytes, 0);
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  EXPECT_TRUE(Get(TestKey(1, 0)).ok());
}

TEST_F(DiskTierTest, PagesThatSomebodyStillHasOutliveTheProcess) {
  ASSERT_TRUE(Open(16 << 20, /*keeps=*/true).ok());
  for (const SequenceId sequence : {3, 5, 9}) PutMany(sequence);
  ASSERT_TRUE(Open(16 << 20, /*keeps=*/true, /*restores=*/true).ok());
  std::vector<StoredPage> kept;
  for (const SequenceId sequence : {5, 7}) {
    for (int64_t page = 0; page < 60; ++page) kept.push_back({TestKey(sequence, page), kPageBytes});
  }
  ASSERT_TRUE(tier_->Restore(kept).ok());
  EXPECT_EQ(tier_->Stats().pages, 120);
  const auto page = Get(TestKey(5, 59));
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(*page, TestPage(TestKey(5, 59), kPageBytes));
  EXPECT_EQ(Get(TestKey(7, 0)).status().code(), absl::StatusCode::kNotFound) << "it is a miss";
  for (const SequenceId gone : {3, 9}) {
    EXPECT_EQ(Get(TestKey(gone, 1)).status().code(), absl::StatusCode::kNotFound) << gone;
  }
  ASSERT_TRUE(tier_->EraseSequence(5).ok());
  ASSERT_TRUE(tier_->EraseSequence(7).ok());
  EXPECT_EQ(tier_->Stats().used_bytes, 0);
  EXPECT_TRUE(Open().ok()) << "its version has gone with the pages";
}

TEST_F(DiskTierTest, PagesOverALowerLimitAreMissesAndLeaveTheMedium) {
  ASSERT_TRUE(Open(16 << 20, /*keeps=*/true).ok());
  PutMany(1);
  std::vector<StoredPage> kept;
  for (int64_t page = 0; page < 60; ++page) kept.push_back({TestKey(1, page), kPageBytes});
  const int64_t half = tier_->Stats().used_bytes / 2;
  ASSERT_TRUE(Open(half, /*keeps=*/true, /*restores=*/true).ok());
  ASSERT_TRUE(tier_->Restore(kept).ok());
  EXPECT_EQ(tier_->Stats().pages, 30);
  EXPECT_LE(tier_->Stats().used_bytes, half);
  EXPECT_EQ(*Get(TestKey(1, 29)), TestPage(TestKey(1, 29), kPageBytes));
  EXPECT_EQ(Get(TestKey(1, 30)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DiskTierTest, AnotherFormatVersionIsRefusedNamingBothAndNotTouched) {
  WriteForeign("heavywater", "99");
  for (int round = 0; round < 2; ++round) {
    const absl::Status refused = Open();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("format version 99"), HasSubstr("this service writes 1")));
  }
}

TEST_F(DiskTierTest, ADatabaseOfSomebodyElseIsRefusedAndNotTouched) {
  WriteForeign("customer", "data");
  for (int round = 0; round < 2; ++round) {
    const absl::Status refused = Open();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("not a disk tier"));
  }
}

TEST_F(DiskTierTest, AFolderThatAnotherServiceHasOpenIsUnavailable) {
  ASSERT_TRUE(Open().ok());
  const auto second = OpenDiskTier({.path = folder_, .total_bytes = 1 << 20});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(folder_));
}

TEST_F(DiskTierTest, AChangedByteOnDiskIsDataLossForThatPageOnly) {
  ASSERT_TRUE(Open().ok());
  PutMany(1);
  ASSERT_TRUE(ChangeOnDisk(TestKey(1, 5), [](const fs::path& file, int64_t offset) {
    std::fstream out(file, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(offset + 777);
    out.put(static_cast<char>(TestPage(TestKey(1, 5), kPageBytes)[777]) ^ 1);
  }));
  EXPECT_EQ(Get(TestKey(1, 5)).status().code(), absl::StatusCode::kDataLoss);
  for (const int64_t page : {4, 6}) {
    EXPECT_EQ(*Get(TestKey(1, page)), TestPage(TestKey(1, page), kPageBytes));
  }
}

TEST_F(DiskTierTest, DamagedFilesDoNotStopWhatComesAndGoesAfterwards) {
  ASSERT_TRUE(Open().ok());
  PutMany(1);
  int64_t damaged = 0;
  for (int64_t page = 0; page < 60; page += 4) {
    damaged += ChangeOnDisk(TestKey(1, page), [](const fs::path& file, int64_t offset) {
      std::fstream out(file, std::ios::binary | std::ios::in | std::ios::out);
      out.seekp(offset + 777);
      out.put('x');
      out.put('y');
    });
  }
  ASSERT_GT(damaged, 4);
  // Its neighbours go, so that their files are mostly garbage, which is collected.
  for (int64_t page = 0; page < 60; ++page) {
    const PageKey key = TestKey(1, page);
    ASSERT_TRUE(page % 4 == 0 || tier_->Erase({&key, 1}).ok());
  }
  for (SequenceId sequence = 2; sequence < 12; ++sequence) {
    for (int64_t page = 0; page < 60; ++page) {
      const absl::Status put = Put(TestKey(sequence, page));
      ASSERT_TRUE(put.ok()) << sequence << " " << page << " " << put;
    }
    for (int64_t page = 0; page < 60; page += 7) {
      EXPECT_EQ(*Get(TestKey(sequence, page)), TestPage(TestKey(sequence, page), kPageBytes));
    }
    ASSERT_TRUE(tier_->EraseSequence(sequence).ok());
  }
}

TEST_F(DiskTierTest, ATruncatedFileIsDataLossForItsPagesAndTheRestGoesOn) {
  ASSERT_TRUE(Open().ok());
  PutMany(1);
  ASSERT_TRUE(ChangeOnDisk(TestKey(1, 5), [](const fs::path& file, int64_t offset) {
    fs::resize_file(file, offset + 100);
  }));
  EXPECT_EQ(Get(TestKey(1, 5)).status().code(), absl::StatusCode::kDataLoss);
  int64_t whole = 0;
  for (int64_t page = 0; page < 60; ++page) {
    const auto got = Get(TestKey(1, page));
    if (!got.ok()) {
      EXPECT_EQ(got.status().code(), absl::StatusCode::kDataLoss);
      continue;
    }
    EXPECT_EQ(*got, TestPage(TestKey(1, page), kPageBytes));
    ++whole;
  }
  EXPECT_GT(whole, 0);
  EXPECT_TRUE(Put(TestKey(2, 0)).ok());
}

// The system refuses to make files longer, as a full disk does.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_;
};

TEST_F(DiskTierTest, AMediumThatTakesNoMoreRefusesPagesAndKeepsWhatItHas) {
  ASSERT_TRUE(Open(64 << 20).ok());
  PutMany(1);
  const FileSizeLimit limit(100 << 10);
  int64_t stored = 0;
  absl::Status refused;
  while (stored < 1000) {
    refused = Put(TestKey(2, stored));
    if (!refused.ok()) break;
    ++stored;
  }
  EXPECT_THAT(refused.code(), ::testing::AnyOf(absl::StatusCode::kUnavailable,
                                               absl::StatusCode::kResourceExhausted))
      << refused;
  EXPECT_EQ(tier_->Stats().pages, 60 + stored) << "a refused page is not counted";
  EXPECT_EQ(Get(TestKey(2, stored)).status().code(), absl::StatusCode::kNotFound);
  for (int64_t page = 0; page < 60; ++page) {
    EXPECT_EQ(*Get(TestKey(1, page)), TestPage(TestKey(1, page), kPageBytes));
  }
  for (int64_t page = 0; page < stored; ++page) {
    EXPECT_EQ(*Get(TestKey(2, page)), TestPage(TestKey(2, page), kPageBytes));
  }
}

// A small file system in memory at a folder; `mounted` is false where that is not allowed.
class SmallFileSystem {
 public:
  SmallFileSystem(const std::string& path, const char* size) : path_(path) {
    std::filesystem::create_directories(path);
    mounted = mount("tmpfs", path.c_str(), "tmpfs", 0, absl::StrCat("size=", size).c_str()) == 0;
  }
  ~SmallFileSystem() {
    if (mounted) umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted = false;

 private:
  const std::string path_;
};

TEST(FullFileSystemTest, PagesAreRefusedBeforeItIsFullAndWhatIsThereStaysReadable) {
  const std::string path = ::testing::TempDir() + "/full_file_system_" + std::to_string(getpid());
  const SmallFileSystem files(path, "128m");
  if (!files.mounted) GTEST_SKIP() << "mounting a file system is not allowed here";
  const std::string filler = path + "/filler";
  {
    const auto tier = *OpenDiskTier({.path = path + "/tier", .total_bytes = 512 << 20});
    const std::vector<std::byte> bytes(1 << 20, std::byte{7});
    absl::Status refused;
    int64_t stored = 0;
    while (refused.ok() && stored < 1000) {
      const PageCopy page{.key = TestKey(1, stored), .bytes = bytes, .crc32c = Crc32c(bytes)};
      refused = tier->Put({&page, 1})[0];
      if (refused.ok()) ++stored;
    }
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("disk_path"));
    EXPECT_GT(stored, 0);
    EXPECT_EQ(tier->Stats().pages, stored);
    // Somebody else takes what is left.
    std::ofstream(filler) << std::string(128 << 20, 'x');
    const PageCopy page{.key = TestKey(2, 0), .bytes = bytes, .crc32c = Crc32c(bytes)};
    EXPECT_EQ(tier->Put({&page, 1})[0].code(), absl::StatusCode::kResourceExhausted);
    std::vector<std::byte> read(bytes.size());
    EXPECT_TRUE(tier->Get(TestKey(1, 0), read).ok());
    EXPECT_EQ(read, bytes);
    std::filesystem::remove(filler);
    EXPECT_TRUE(tier->EraseSequence(1).ok());
  }
  std::filesystem::remove_all(path + "/tier");
}

}  // namespace
}  // namespace heavywater
