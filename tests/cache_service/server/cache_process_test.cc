// The heavywater-cache binary as a process.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "heavywater/v1/admin.grpc.pb.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Standard output and error of a child come through one pipe.
class CacheProcess {
 public:
  explicit CacheProcess(std::vector<std::string> arguments) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    arguments.insert(arguments.begin(), HEAVYWATER_CACHE_BINARY);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      close(ends[0]);
      std::vector<char*> argv;
      for (std::string& argument : arguments) argv.push_back(argument.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    output_ = ends[0];
  }
  ~CacheProcess() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    close(output_);
  }

  // The rest of the line that begins with `prefix`.
  std::string WaitForLine(const std::string& prefix) {
    while (true) {
      const size_t begin = text_.find(prefix);
      const size_t end = begin == std::string::npos ? begin : text_.find('\n', begin);
      if (end != std::string::npos) {
        return text_.substr(begin + prefix.size(), end - begin - prefix.size());
      }
      if (!ReadSome()) return "";
    }
  }
  void Signal(int signal) { kill(pid_, signal); }
  // The exit code, or minus the signal that ended it.
  int Wait() {
    while (ReadSome()) {
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  const std::string& text() const { return text_; }

 private:
  bool ReadSome() {
    char buffer[1024];
    const ssize_t n = read(output_, buffer, sizeof(buffer));
    if (n > 0) text_.append(buffer, n);
    return n > 0;
  }

  pid_t pid_ = 0;
  int output_ = -1;
  std::string text_;
};

bool SlabExists(const std::string& name) {
  const int fd = shm_open(absl::StrCat("/", name).c_str(), O_RDONLY, 0);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

std::string WriteConfig(const std::string& text) {
  const std::string path = absl::StrCat(::testing::TempDir(), "cache-", getpid(), ".yaml");
  std::ofstream(path) << text;
  return path;
}

TEST(CacheProcessTest, SigtermWithOpenCallsEndsItInTimeWithExitCodeZero) {
  const std::string slab = absl::StrCat("heavywater-process-test-", getpid());
  CacheProcess cache({"--listen_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0",
                      "--host_bytes=1048576", absl::StrCat("--slab_name=", slab), "--drain_ms=500",
                      "--log_json"});
  const std::string address = cache.WaitForLine("listening on ");
  ASSERT_THAT(address, StartsWith("127.0.0.1:"));
  ASSERT_THAT(cache.WaitForLine("metrics on "), StartsWith("127.0.0.1:"));
  EXPECT_TRUE(SlabExists(slab));

  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  // A stream that its client leaves open, and a call that waits for another rank.
  const auto pages = v1::PageStoreService::NewStub(channel);
  grpc::ClientContext stream_context;
  v1::WriteResponse written;
  const auto stream = pages->Write(&stream_context, &written);
  grpc::Status join_status;
  std::thread joining([&] {
    grpc::ClientContext context;
    v1::JoinResponse response;
    join_status = v1::GroupService::NewStub(channel)->Join(&context, TestJoin(0, 2), &response);
  });
  const auto admin = v1::AdminService::NewStub(channel);
  for (int64_t groups = 0; groups == 0;) {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    ASSERT_TRUE(admin->Stats(&context, {}, &stats).ok());
    groups = stats.groups();
  }

  const absl::Time start = absl::Now();
  cache.Signal(SIGTERM);
  EXPECT_EQ(cache.Wait(), 0) << cache.text();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  joining.join();
  EXPECT_EQ(join_status.error_code(), grpc::StatusCode::UNAVAILABLE);
  stream->WritesDone();
  EXPECT_FALSE(stream->Finish().ok());
  EXPECT_FALSE(SlabExists(slab));
  EXPECT_THAT(cache.text(), HasSubstr("\"message\":\"stopped\""));
}

TEST(CacheProcessTest, ASlabLeftByAKilledServiceDoesNotStopTheNext) {
  const std::string slab = absl::StrCat("heavywater-killed-test-", getpid());
  const std::vector<std::string> arguments = {"--listen_address=127.0.0.1:0",
                                              "--metrics_address=", "--host_bytes=1048576",
                                              absl::StrCat("--slab_name=", slab)};
  CacheProcess killed(arguments);
  ASSERT_NE(killed.WaitForLine("listening on "), "");
  CacheProcess second(arguments);
  EXPECT_EQ(second.Wait(), 1) << "the first one's slab is in use";
  EXPECT_THAT(second.text(), HasSubstr(slab));
  killed.Signal(SIGKILL);
  EXPECT_EQ(killed.Wait(), -SIGKILL);
  EXPECT_TRUE(SlabExists(slab));
  CacheProcess next(arguments);
  ASSERT_NE(next.WaitForLine("listening on "), "") << next.text();
  next.Signal(SIGTERM);
  EXPECT_EQ(next.Wait(), 0);
  EXPECT_FALSE(SlabExists(slab));
}

TEST(CacheProcessTest, ConfigurationErrorsNameTheKeyAndExitWithTwo) {
  const std::string path = WriteConfig("host_bytes: 1048576\nhost_bites: 5\n");
  const struct {
    std::vector<std::string> arguments;
    const char* name;
  } cases[] = {
      {{"--config", path}, "host_bites"},
      {{"--host_bytes=much"}, "host_bytes"},
      {{"--host_bytes=-5"}, "host_bytes is -5"},
      {{"--no_such_flag=1"}, "no_such_flag"},
      {{"--log_level=loud"}, "log_level is \"loud\""},
      {{"--redis_address=redis:6379", "--redis_password_file=p"}, "redis:6379 in plaintext"},
      {{"--config=/no/such/file.yaml"}, "/no/such/file.yaml"}};
  for (const auto& [arguments, name] : cases) {
    CacheProcess cache(arguments);
    EXPECT_EQ(cache.Wait(), 2) << name;
    EXPECT_THAT(cache.text(), AllOf(HasSubstr("heavywater-cache: "), HasSubstr(name)));
  }
}

TEST(CacheProcessTest, APasswordGoesInPlaintextToThisMachineOrWhereThatIsAllowed) {
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--redis_address=127.0.0.1:6379"},
        {"--redis_address=redis:6379", "--allow_plaintext=true"},
        {"--redis_address=redis:6379", "--redis_ca_file=ca"}}) {
    std::vector<std::string> arguments = {"--redis_password_file=p", "--check_config"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    CacheProcess cache(arguments);
    EXPECT_EQ(cache.Wait(), 0) << cache.text();
  }
}

TEST(CacheProcessTest, PrintsItsVersionAndItsFlags) {
  CacheProcess version({"--version"});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_THAT(version.text(), StartsWith("heavywater-cache "));
  CacheProcess help({"--help"});
  EXPECT_EQ(help.Wait(), 0);
  EXPECT_THAT(help.text(), HasSubstr("--sequence_lease_ms"));
}

}  // namespace
}  // namespace heavywater
