#include "cache_service/tier/state_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StateFolderTest : public ::testing::Test {
 protected:
  StateFolderTest() {
    static int count = 0;
    path_ =
        (fs::temp_directory_path() / absl::StrCat("heavywater-state-test-", getpid(), "-", ++count))
            .string();
    fs::remove_all(path_);
    Open();
  }
  ~StateFolderTest() override {
    folder_.reset();
    fs::remove_all(path_);
  }
  void Open() {
    folder_.reset();
    auto opened = StateFolder::Open(path_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    folder_ = *std::move(opened);
    folder_->CountIn(count_);
  }
  void Put(const std::string& key, const std::string& value) {
    StateBatch batch;
    batch.Put(key, value);
    folder_->Apply(batch);
  }
  std::vector<std::string> Values(const std::string& prefix) {
    std::vector<std::string> values;
    EXPECT_TRUE(folder_
                    ->ForEach(prefix,
                              [&](std::string_view, std::string_view value) {
                                values.emplace_back(value);
                                return absl::OkStatus();
                              })
                    .ok());
    return values;
  }

  std::string path_;
  std::unique_ptr<StateFolder> folder_;
  std::atomic<uint64_t> count_ = 0;
};

TEST_F(StateFolderTest, RecordsComeBackInTheOrderOfTheirNumbers) {
  for (const uint64_t number : {300, 2, 70000}) {
    Put(StateKey(StateKind::kReport, 9, number), absl::StrCat(number));
  }
  Put(StateKey(StateKind::kReport, 10, 1), "another sequence's");
  Put(StateKey(StateKind::kSequence, 9), "another kind");
  Open();
  EXPECT_THAT(Values(StateKey(StateKind::kReport, 9)), ElementsAre("2", "300", "70000"));
  StateBatch batch;
  batch.DeletePrefix(StateKey(StateKind::kReport, 9));
  batch.Put(StateKey(StateKind::kReport, 9, 5), "after it");
  folder_->Apply(batch);
  Open();
  EXPECT_THAT(Values(StateKey(StateKind::kReport)), ElementsAre("after it", "another sequence's"));
}

TEST_F(StateFolderTest, OneThatLacksChangesIsTold) {
  Put("Sa", "1");
  Put("Sa", "2");
  EXPECT_EQ(count_, 2u);
  folder_.reset();
  const fs::path copy = fs::path(path_) += "-old";
  fs::remove_all(copy);
  fs::copy(path_, copy, fs::copy_options::recursive);
  Open();
  EXPECT_TRUE(folder_->Matches(2));
  Put("Sa", "3");
  Put("Sa", "4");
  folder_.reset();
  const auto old = StateFolder::Open(copy.string());
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_TRUE((*old)->Matches(2));
  EXPECT_TRUE((*old)->Matches(1)) << "the last change was made, and not counted yet";
  EXPECT_FALSE((*old)->Matches(count_));
  EXPECT_FALSE((*old)->Matches(kStateBroken));
  fs::remove_all(copy);
}

TEST_F(StateFolderTest, AnotherVersionIsNamedAndNotRead) {
  folder_.reset();
  std::ofstream(fs::path(path_) / "HEAVYWATER_STATE") << "heavywater state 99\n";
  const auto opened = StateFolder::Open(path_);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("heavywater state 99"));
  auto anew = StateFolder::OpenAnew(path_);
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_EQ((*anew)->num_changes(), 0u);
}

TEST_F(StateFolderTest, OneOfTheVersionBeforeGoesOnAsOneOfThis) {
  Put("Sa", "1");
  folder_.reset();
  const fs::path file = fs::path(path_) / "HEAVYWATER_STATE";
  for (int version = kOldestStateFormatVersion; version <= kStateFormatVersion; ++version) {
    std::ofstream(file) << "heavywater state " << version << "\n";
    Open();
    EXPECT_THAT(Values("S"), ElementsAre("1")) << version;
    folder_.reset();
    std::string text;
    std::getline(std::ifstream(file), text);
    EXPECT_EQ(text, absl::StrCat("heavywater state ", kStateFormatVersion));
  }
  std::ofstream(file) << "heavywater state " << kOldestStateFormatVersion - 1 << "\n";
  EXPECT_EQ(StateFolder::Open(path_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(StateFolderTest, AVersionThatCannotBeReadIsNotAnotherVersion) {
  Put("Sa", "1");
  folder_.reset();
  const fs::path file = fs::path(path_) / "HEAVYWATER_STATE";
  fs::rename(file, fs::path(path_) / "aside");
  fs::create_directory(file);  // reading it fails
  EXPECT_EQ(StateFolder::Open(path_).status().code(), absl::StatusCode::kUnavailable);
  fs::remove(file);
  fs::rename(fs::path(path_) / "aside", file);
  Open();
  EXPECT_THAT(Values("S"), ElementsAre("1"));
}

TEST_F(StateFolderTest, AMissingFileIsDamage) {
  Put("Sa", "1");
  folder_.reset();
  int removed = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(path_) / "db")) {
    if (entry.path().filename().string().starts_with("MANIFEST")) {
      removed += fs::remove(entry.path()) ? 1 : 0;
    }
  }
  ASSERT_EQ(removed, 1);
  const auto opened = StateFolder::Open(path_);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kDataLoss) << opened.status();
  EXPECT_TRUE(StateFolder::OpenAnew(path_).ok());
}

TEST_F(StateFolderTest, FilesOfSomebodyElseAreRefusedAndStay) {
  const fs::path folder = fs::path(path_) / "other";
  fs::create_directories(folder);
  std::ofstream(folder / "letter.txt") << "dear";
  const auto opened = StateFolder::Open(folder.string());
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(StateFolder::OpenAnew(folder.string()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(fs::exists(folder / "letter.txt"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
}

TEST_F(StateFolderTest, OneThatIsOpenElsewhereCannotBeUsed) {
  Put("Sa", "1");
  // Also where the other one is of another version.
  std::ofstream(fs::path(path_) / "HEAVYWATER_STATE") << "heavywater state 99\n";
  EXPECT_EQ(StateFolder::Open(path_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(StateFolder::OpenAnew(path_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Values("S"), ElementsAre("1"));
}

// The system refuses to make files longer, as a full disk does.
TEST_F(StateFolderTest, TheFirstWriteThatFailsIsToldOnce) {
  int told = 0;
  folder_->WhenBroken([&](const absl::Status& why) { told += why.ok() ? 0 : 1; });
  Put("Sa", "1");
  EXPECT_EQ(told, 0);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit = {1 << 10, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  for (int i = 0; i < 3; ++i) Put("Sb", std::string(100 << 10, 'x'));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(folder_->broken().ok());
  EXPECT_EQ(told, 1);
  EXPECT_EQ(count_, kStateBroken);
}

// A byte of the log that is wrong, with more records after it, must not give the state
// of before it.
TEST_F(StateFolderTest, ADamagedLogIsNotRead) {
  for (int i = 0; i < 200; ++i) Put(absl::StrCat("S", i), std::string(1000, 'x'));
  folder_.reset();
  fs::path log;
  for (const auto& entry : fs::directory_iterator(fs::path(path_) / "db")) {
    if (entry.path().extension() == ".log") log = entry.path();
  }
  ASSERT_FALSE(log.empty());
  std::fstream file(log, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(fs::file_size(log) / 2));
  file.put('y');
  file.close();
  const auto opened = StateFolder::Open(path_);
  if (opened.ok()) {
    EXPECT_FALSE((*opened)->Matches(count_)) << "an old state would be taken for the last one";
  } else {
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kDataLoss) << opened.status();
    EXPECT_THAT(std::string(opened.status().message()), HasSubstr(path_));
  }
}

}  // namespace
}  // namespace heavywater
