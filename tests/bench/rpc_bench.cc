// `rpc`: tokens a second through Generate, of one and of many sequences at once, beside
// the same steps without a server.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "client/cpp/client.h"
#include "tests/bench/bench_runner.h"
#include "tests/bench/line_process.h"
#include "tests/bench/options.h"
#include "tests/bench/timing.h"

namespace heavywater {
namespace {

constexpr int kSequences[] = {1, 8};
constexpr int kQuickSequences[] = {2};
constexpr int kRounds = 5;  // odd: the median counts
constexpr int64_t kPromptTokens = 192;
constexpr int64_t kHeavyTokens = 64;
constexpr int64_t kRecentTokens = 64;
constexpr int kNewTokens = 96;
constexpr int kQuickNewTokens = 8;
constexpr absl::Duration kReadyTimeout = absl::Seconds(120);

PolicyOptions OwnPolicy() {
  PolicyOptions policy;  // snapkv_h2o
  policy.heavy_tokens = kHeavyTokens;
  policy.recent_tokens = kRecentTokens;
  return policy;
}

// One server that this process starts, and ends.
absl::StatusOr<std::string> StartServer(const std::string& name, std::vector<std::string> flags,
                                        std::unique_ptr<LineProcess>& process) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  flags.insert(flags.begin(), (self.parent_path() / name).string());
  flags.insert(flags.end(), {"--listen_address=127.0.0.1:0", "--log_level=error"});
  HW_ASSIGN_OR_RETURN(process, LineProcess::Start(std::move(flags)));
  while (true) {
    const auto line = process->Read();
    if (!line.ok()) {
      return absl::UnavailableError(absl::StrCat(name, " has ended before it listened"));
    }
    std::string_view address = *line;
    if (address.starts_with("listening on ")) return std::string(address.substr(13));
  }
}

// A cache service and one rank with one thread.
class Servers {
 public:
  static absl::StatusOr<std::unique_ptr<Servers>> Start(const std::string& model) {
    auto servers = std::make_unique<Servers>();
    HW_ASSIGN_OR_RETURN(const std::string cache,
                        StartServer("heavywater-cache", {}, servers->cache_));
    HW_ASSIGN_OR_RETURN(
        const std::string worker,
        StartServer("heavywater-worker",
                    {absl::StrCat("--cache_address=", cache), absl::StrCat("--model=", model)},
                    servers->worker_));
    HW_ASSIGN_OR_RETURN(servers->client_,
                        Client::Connect({.worker_address = worker, .cache_address = cache}));
    HW_RETURN_IF_ERROR(servers->WaitUntilReady());
    return servers;
  }

  Client& client() { return *client_; }

 private:
  // Ready is who generates.
  absl::Status WaitUntilReady() {
    v1::GenerateRequest request;
    request.add_tokens(0);
    request.set_max_new_tokens(1);
    const absl::Time deadline = absl::Now() + kReadyTimeout;
    while (true) {
      const absl::Status status =
          client_->Generate(request, [](const v1::GenerateResponse&) { return true; }).status();
      if (!absl::IsUnavailable(status) || absl::Now() > deadline) return status;
      absl::SleepFor(absl::Milliseconds(100));
    }
  }

  std::unique_ptr<LineProcess> cache_;
  std::unique_ptr<LineProcess> worker_;  // ends first
  std::unique_ptr<Client> client_;
};

// What a client of Generate sees of its sequence.
struct Stream {
  absl::Status status;
  std::vector<int32_t> ids;
  std::vector<absl::Time> times;
};

v1::GenerateRequest RequestOf(const std::vector<int32_t>& prompt, int new_tokens) {
  v1::GenerateRequest request;
  request.mutable_tokens()->Assign(prompt.begin(), prompt.end());
  request.set_max_new_tokens(new_tokens);
  request.set_ignore_eos(true);
  request.mutable_policy()->set_policy("snapkv_h2o");
  request.mutable_policy()->set_heavy_tokens(kHeavyTokens);
  request.mutable_policy()->set_recent_tokens(kRecentTokens);
  return request;
}

absl::Status Ask(Client& client, const v1::GenerateRequest& request, Stream& stream) {
  HW_ASSIGN_OR_RETURN(const auto generation, client.Generate(request));
  while (true) {
    HW_ASSIGN_OR_RETURN(const auto token, generation->Next());
    if (!token.has_value()) break;
    stream.times.push_back(absl::Now());
    stream.ids.push_back(token->token());
  }
  return client.Close(generation->sequence_id());
}

struct Speed {
  double tokens_per_s = 0;    // while all sequences decode
  double first_token_ms = 0;  // of the last one
  std::vector<std::vector<int32_t>> ids;
};

absl::StatusOr<Speed> MeasureServer(Client& client,
                                    const std::vector<std::vector<int32_t>>& prompts,
                                    int new_tokens) {
  std::vector<Stream> streams(prompts.size());
  std::vector<std::thread> threads;
  const absl::Time start = absl::Now();
  for (size_t i = 0; i < prompts.size(); ++i) {
    threads.emplace_back(
        [&, i] { streams[i].status = Ask(client, RequestOf(prompts[i], new_tokens), streams[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  Speed speed;
  absl::Time all_began = start;
  absl::Time first_ended = absl::InfiniteFuture();
  for (Stream& stream : streams) {
    HW_RETURN_IF_ERROR(stream.status);
    all_began = std::max(all_began, stream.times.front());
    first_ended = std::min(first_ended, stream.times.back());
    speed.ids.push_back(std::move(stream.ids));
  }
  int64_t tokens = 0;
  for (const Stream& stream : streams) {
    tokens += std::ranges::count_if(
        stream.times, [&](absl::Time time) { return time > all_began && time <= first_ended; });
  }
  if (tokens == 0) {
    return absl::InternalError("the sequences were never all decoded at once: more new tokens");
  }
  speed.tokens_per_s = static_cast<double>(tokens) / absl::ToDoubleSeconds(first_ended - all_began);
  speed.first_token_ms = absl::ToDoubleMilliseconds(all_began - start);
  return speed;
}

absl::StatusOr<Speed> MeasureRunner(BenchRunner& runner,
                                    const std::vector<std::vector<int32_t>>& prompts,
                                    int new_tokens) {
  const auto count = static_cast<SequenceId>(prompts.size());
  const absl::Time start = absl::Now();
  for (SequenceId i = 0; i < count; ++i) {
    HW_RETURN_IF_ERROR(runner.Open(i + 1, OwnPolicy(), prompts[i], new_tokens));
  }
  Speed speed;
  const absl::Time began = absl::Now();
  speed.first_token_ms = absl::ToDoubleMilliseconds(began - start);
  for (int i = 1; i < new_tokens; ++i) HW_RETURN_IF_ERROR(runner.Step());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - began);
  speed.tokens_per_s = static_cast<double>(count) * (new_tokens - 1) / seconds;
  for (SequenceId i = 0; i < count; ++i) {
    HW_RETURN_IF_ERROR(runner.CheckSets(i + 1));
    speed.ids.push_back(runner.ids(i + 1));
    HW_RETURN_IF_ERROR(runner.Close(i + 1));
  }
  return speed;
}

// Different parts of a text.
std::vector<std::vector<int32_t>> PromptsOf(const std::vector<int32_t>& text, int count) {
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < count; ++i) {
    const auto first =
        static_cast<int64_t>(i) * (static_cast<int64_t>(text.size()) - kPromptTokens) / count;
    prompts.emplace_back(text.begin() + first, text.begin() + first + kPromptTokens);
  }
  return prompts;
}

absl::StatusOr<BenchJson> MeasureRow(Client& client, BenchRunner& runner,
                                     const std::vector<std::vector<int32_t>>& prompts, int rounds,
                                     int new_tokens) {
  std::vector<double> server;
  std::vector<double> server_first;
  std::vector<double> own;
  std::vector<double> own_first;
  for (int round = 0; round < rounds; ++round) {
    HW_ASSIGN_OR_RETURN(const Speed through, MeasureServer(client, prompts, new_tokens));
    HW_ASSIGN_OR_RETURN(const Speed without, MeasureRunner(runner, prompts, new_tokens));
    if (through.ids != without.ids) {
      return absl::InternalError("a sequence got other tokens through the server than without it");
    }
    server.push_back(through.tokens_per_s);
    server_first.push_back(through.first_token_ms);
    own.push_back(without.tokens_per_s);
    own_first.push_back(without.first_token_ms);
  }
  return BenchJson{{"sequences", prompts.size()},
                   {"tokens_per_s", Median(server)},
                   {"runner_tokens_per_s", Median(own)},
                   {"vs_runner", Median(server) / Median(own)},
                   {"first_token_ms", Median(server_first)},
                   {"runner_first_token_ms", Median(own_first)}};
}

}  // namespace

absl::StatusOr<BenchJson> RunRpcBench(const BenchOptions& options) {
  HW_RETURN_IF_ERROR(CheckHasModel(options));
  HW_ASSIGN_OR_RETURN(const auto file, OpenModel(options.model));
  HW_ASSIGN_OR_RETURN(const std::vector<ExpectedText> texts, ReadExpectedTexts());
  const auto ranks = CreateLocalGroup(1, absl::Seconds(600));
  HW_ASSIGN_OR_RETURN(const auto runner, BenchRunner::Create(*file, *ranks[0], KvDtype::kBFloat16));
  HW_ASSIGN_OR_RETURN(const auto servers, Servers::Start(options.model));
  std::vector<int> counts(std::begin(kSequences), std::end(kSequences));
  if (options.quick) counts.assign(std::begin(kQuickSequences), std::end(kQuickSequences));
  BenchJson rows = BenchJson::array();
  for (const int count : counts) {
    const auto prompts = PromptsOf(texts.back().prompt, count);
    HW_ASSIGN_OR_RETURN(BenchJson row,
                        MeasureRow(servers->client(), *runner, prompts, options.quick ? 1 : kRounds,
                                   options.quick ? kQuickNewTokens : kNewTokens));
    rows.push_back(std::move(row));
  }
  return BenchJson{{"rows", std::move(rows)}};
}

}  // namespace heavywater
