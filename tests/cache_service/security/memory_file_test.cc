#include "cache_service/security/memory_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace heavywater {
namespace {

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(MemoryFileTest, IsReadByItsPathAgainAndAgain) {
  const auto file = MemoryFile::Create("one");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(Read(file->path()), "one");
  EXPECT_EQ(Read(file->path()), "one");
}

TEST(MemoryFileTest, ReplacesTheContentsUnderTheSamePathWithoutTouchingOpenReaders) {
  auto file = MemoryFile::Create("a long first text");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string path = file->path();
  std::ifstream before(path);
  ASSERT_TRUE(file->Replace("second").ok());
  EXPECT_EQ(file->path(), path);
  EXPECT_EQ(Read(path), "second");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(before), {}), "a long first text");
}

TEST(MemoryFileTest, ThePathOfOneThatHasGoneIsTheNextOnes) {
  std::string path;
  {
    const auto file = MemoryFile::Create("gone");
    ASSERT_TRUE(file.ok()) << file.status();
    path = file->path();
  }
  const std::ifstream unrelated("/dev/null");
  const auto next = MemoryFile::Create("next");
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->path(), path);
  EXPECT_EQ(Read(path), "next");
}

}  // namespace
}  // namespace heavywater
