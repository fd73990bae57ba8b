#include "cache_service/runtime/config_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "heavywater/v1/config.pb.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

class ConfigLoaderTest : public ::testing::Test {
 protected:
  std::string WriteFile(const std::string& text) {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string path = ::testing::TempDir() + info->name() + ".yaml";
    std::ofstream(path) << text;
    return path;
  }

  absl::StatusOr<Flags> Parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "heavywater-cache");
    return ParseFlags(static_cast<int>(arguments.size()), arguments.data(), config_);
  }

  v1::CacheConfig config_;
};

TEST_F(ConfigLoaderTest, ReadsEveryScalarTypeFromTheFile) {
  const std::string path =
      WriteFile("listen_address: 127.0.0.1:0\nhost_bytes: 4294967296\nlog_json: true\ndrain_ms:\n");
  config_.set_drain_ms(7);
  ASSERT_TRUE(LoadConfig(path, {}, &config_).ok());
  EXPECT_EQ(config_.listen_address(), "127.0.0.1:0");
  EXPECT_EQ(config_.host_bytes(), 4294967296);
  EXPECT_TRUE(config_.log_json());
  EXPECT_EQ(config_.drain_ms(), 7) << "a key without a value keeps the default";
}

TEST_F(ConfigLoaderTest, FlagsOverrideTheFile) {
  const std::string path = WriteFile("host_bytes: 1\nmax_groups: 2\n");
  ASSERT_TRUE(LoadConfig(path, {{"host_bytes", "3"}}, &config_).ok());
  EXPECT_EQ(config_.host_bytes(), 3);
  EXPECT_EQ(config_.max_groups(), 2);
}

TEST_F(ConfigLoaderTest, RefusesAnUnknownKeyNamingItAndChangesNothing) {
  const std::string path = WriteFile("host_bytes: 5\nhost_byte: 6\n");
  const absl::Status status = LoadConfig(path, {}, &config_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("host_byte"), HasSubstr(path)));
  EXPECT_EQ(config_.host_bytes(), 0);
}

TEST_F(ConfigLoaderTest, RefusesAValueOfTheWrongTypeNamingKeyValueAndType) {
  for (const char* text : {"host_bytes: many\n", "host_bytes: 1.5\n", "host_bytes: [1]\n",
                           "host_bytes: 99999999999999999999\n", "log_json: maybe\n"}) {
    const absl::Status status = LoadConfig(WriteFile(text), {}, &config_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    const std::string key(text, std::string(text).find(':'));
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(key), HasSubstr("want"))) << text;
  }
}

TEST_F(ConfigLoaderTest, RefusesBrokenFiles) {
  EXPECT_EQ(LoadConfig("/no/such/file", {}, &config_).code(), absl::StatusCode::kNotFound);
  const absl::Status folder = LoadConfig(::testing::TempDir(), {}, &config_);
  EXPECT_EQ(folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(folder.message()), HasSubstr("is a folder"));
  for (const char* text : {"a: b: c", "- list\n", "just text\n", "drain_ms: 1\ndrain_ms: 2\n",
                           "drain_ms: 1\n---\ndrain_ms: 2\n"}) {
    EXPECT_EQ(LoadConfig(WriteFile(text), {}, &config_).code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST_F(ConfigLoaderTest, AnEmptyFileIsTheDefaults) {
  config_.set_max_groups(9);
  for (const char* text : {"", "# nothing\n", "---\n"}) {
    EXPECT_TRUE(LoadConfig(WriteFile(text), {}, &config_).ok()) << text;
  }
  EXPECT_EQ(config_.max_groups(), 9);
}

TEST_F(ConfigLoaderTest, ParsesBothFormsOfFlagsAndBareBooleans) {
  const auto flags = Parse({"--config", "a.yaml", "--host_bytes=10", "--slab_name", "x",
                            "--log_json", "--disable_slab=false"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->config_path, "a.yaml");
  EXPECT_THAT(flags->overrides,
              ElementsAre(Pair("host_bytes", "10"), Pair("slab_name", "x"),
                          Pair("log_json", "true"), Pair("disable_slab", "false")));
}

TEST_F(ConfigLoaderTest, RefusesBadFlagsNamingThem) {
  EXPECT_THAT(std::string(Parse({"--nothing=1"}).status().message()), HasSubstr("nothing"));
  EXPECT_THAT(std::string(Parse({"stray"}).status().message()), HasSubstr("stray"));
  EXPECT_THAT(std::string(Parse({"--host_bytes"}).status().message()), HasSubstr("host_bytes"));
  EXPECT_TRUE(Parse({"--version"})->show_version);
  EXPECT_TRUE(Parse({"--help"})->show_help);
  EXPECT_TRUE(Parse({"--check_config"})->check_config);
  EXPECT_FALSE(Parse({"--help"})->check_config);
}

TEST_F(ConfigLoaderTest, TheYamlOfAConfigReadsBackAsTheSameConfig) {
  config_.set_listen_address("[::1]:80 # \"quoted\"");
  config_.set_host_bytes(-1);
  config_.set_log_json(true);
  v1::CacheConfig copy;
  ASSERT_TRUE(LoadConfig(WriteFile(ConfigToYaml(config_)), {}, &copy).ok());
  EXPECT_EQ(copy.SerializeAsString(), config_.SerializeAsString());
}

TEST_F(ConfigLoaderTest, HelpNamesEveryFlagWithItsDefault) {
  config_.set_host_bytes(77);
  const std::string help = ConfigHelp("heavywater-cache", config_);
  EXPECT_THAT(help, HasSubstr("--host_bytes (an integer of 64 bits) [77]"));
  EXPECT_THAT(help, HasSubstr("--log_json"));
  EXPECT_THAT(help, HasSubstr("\nHow long a suspended sequence is kept, unless its Suspend asks"));
  EXPECT_THAT(help, HasSubstr("\n  --drain_ms (an integer of 64 bits) [0]: grace on SIGTERM"));
}

}  // namespace
}  // namespace heavywater
