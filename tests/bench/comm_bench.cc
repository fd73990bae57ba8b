// `comm`: the collectives of a step of three ranks, and what a token costs them on two
// cores or fewer, beside one rank that has all of the model.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "tests/bench/bench_runner.h"
#include "tests/bench/options.h"

namespace heavywater {
namespace {

constexpr int kRanks = 3;
constexpr int kCalls = 200;  // in a row; each rank's times, the slowest counts
constexpr int kQuickCalls = 10;
constexpr int64_t kPromptTokens = 512;
constexpr int kTokens = 64;
constexpr int kQuickTokens = 2;
constexpr SequenceId kSequence = 1;
constexpr absl::Duration kTimeout = absl::Seconds(120);

using Ranks = std::vector<std::unique_ptr<Communicator>>;

// body(rank) on a thread for each rank; the first rank's error that is one.
absl::Status OnEveryRank(const std::function<absl::Status(int)>& body) {
  std::vector<absl::Status> results(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) HW_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::StatusOr<Ranks> ConnectRanks(const std::string& communicator) {
  if (communicator == "local") return CreateLocalGroup(kRanks, kTimeout);
  InProcessRendezvous store;
  Ranks ranks(kRanks);
  HW_RETURN_IF_ERROR(OnEveryRank([&](int rank) -> absl::Status {
    HW_ASSIGN_OR_RETURN(
        ranks[static_cast<size_t>(rank)],
        CreateGlooCommunicator({.rank = rank, .size = kRanks, .timeout = kTimeout}, store));
    return absl::OkStatus();
  }));
  return ranks;
}

// What the ranks exchange in a step of one sequence.
struct StepShape {
  const char* model;
  int64_t hidden;
  int64_t vocab;
  int64_t layers;
  int64_t slots;  // of a layer: a budget of 20 % of 8192 tokens
};
constexpr StepShape kShapes[] = {{"smollm2-135m", 576, 49152, 30, 1638},
                                 {"llama-3-8b", 4096, 128256, 32, 1638}};

struct Collective {
  const char* name;
  int64_t count;  // elements of each rank
  int64_t element_bytes;
};
std::vector<Collective> CollectivesOf(const StepShape& shape) {
  return {{"all_reduce hidden", shape.hidden, 4},
          {"all_gather logits", shape.vocab / kRanks, 4},
          {"all_reduce scores", shape.layers * shape.slots, 8}};
}

// One rank's calls, timed one by one.
class CollectiveCalls {
 public:
  CollectiveCalls(Communicator& comm, const Collective& collective)
      : comm_(comm),
        sums_(collective.element_bytes == 8),
        gathers_(std::string(collective.name).starts_with("all_gather")),
        floats_(static_cast<size_t>(collective.count)),
        integers_(static_cast<size_t>(sums_ ? collective.count : 0)),
        gathered_(gathers_ ? floats_.size() * kRanks : 0) {}

  absl::Status Run(std::vector<double>& times_us) {
    for (double& time_us : times_us) {
      const float value = static_cast<float>(comm_.rank() + 1);
      std::fill(floats_.begin(), floats_.end(), value);
      std::fill(integers_.begin(), integers_.end(), comm_.rank() + 1);
      HW_RETURN_IF_ERROR(comm_.Barrier());
      const absl::Time start = absl::Now();
      HW_RETURN_IF_ERROR(Call());
      time_us = absl::ToDoubleMicroseconds(absl::Now() - start);
      HW_RETURN_IF_ERROR(Check());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Call() {
    const DeviceSpan<float> floats(floats_.data(), static_cast<int64_t>(floats_.size()));
    if (sums_) {
      return comm_.AllReduceSum(
          DeviceSpan<int64_t>(integers_.data(), static_cast<int64_t>(integers_.size())), stream_);
    }
    if (!gathers_) return comm_.AllReduceSum(floats, stream_);
    return comm_.AllGather(
        DeviceSpan<const float>(floats),
        DeviceSpan<float>(gathered_.data(), static_cast<int64_t>(gathered_.size())), stream_);
  }

  absl::Status Check() const {
    constexpr int kSum = kRanks * (kRanks + 1) / 2;
    bool right = true;
    if (sums_) {
      right = std::ranges::all_of(integers_, [](int64_t value) { return value == kSum; });
    } else if (gathers_) {
      for (size_t i = 0; i < gathered_.size(); ++i) {
        right = right && gathered_[i] == static_cast<float>(i / floats_.size() + 1);
      }
    } else {
      right = std::ranges::all_of(floats_, [](float value) { return value == kSum; });
    }
    return right ? absl::OkStatus() : absl::InternalError("a collective's result is wrong");
  }

  Communicator& comm_;
  const bool sums_;
  const bool gathers_;
  std::vector<float> floats_;
  std::vector<int64_t> integers_;
  std::vector<float> gathered_;
  Stream stream_;
};

absl::StatusOr<BenchJson> MeasureCollective(Ranks& ranks, const StepShape& shape,
                                            const Collective& collective, int calls) {
  std::vector<std::vector<double>> times(kRanks, std::vector<double>(static_cast<size_t>(calls)));
  HW_RETURN_IF_ERROR(OnEveryRank([&](int rank) {
    return CollectiveCalls(*ranks[static_cast<size_t>(rank)], collective)
        .Run(times[static_cast<size_t>(rank)]);
  }));
  std::vector<double> slowest = times[0];
  for (const auto& of_rank : times) {
    std::ranges::transform(slowest, of_rank, slowest.begin(), std::ranges::max);
  }
  std::ranges::sort(slowest);
  return BenchJson{
      {"communicator", ranks[0]->Name()},  {"model", shape.model},
      {"collective", collective.name},     {"bytes", collective.count * collective.element_bytes},
      {"us", slowest[slowest.size() / 2]}, {"us_p90", slowest[slowest.size() * 9 / 10]}};
}

// What a rank's steps take, in wall time.
struct RankTimes {
  double ms_per_token = 0;  // the median
  double reduce_share = 0;
  std::vector<int32_t> ids;
};

absl::Status MeasureRank(const ModelFile& file, Communicator& comm, int tokens, RankTimes& times) {
  HW_ASSIGN_OR_RETURN(const auto runner, BenchRunner::Create(file, comm, KvDtype::kBFloat16));
  HW_ASSIGN_OR_RETURN(const std::vector<ExpectedText> texts, ReadExpectedTexts());
  std::vector<int32_t> prompt;
  for (const ExpectedText& text : texts) {
    if (text.prompt.size() > prompt.size()) prompt = text.prompt;
  }
  prompt.resize(std::min<size_t>(prompt.size(), kPromptTokens));
  HW_RETURN_IF_ERROR(runner->Open(kSequence, PolicyOptions(), prompt, tokens + 1));
  HW_RETURN_IF_ERROR(runner->Step());  // the first allocates
  TakeStepPhaseTimes();
  std::vector<double> ms;
  for (int i = 0; i < tokens; ++i) {
    const absl::Time start = absl::Now();
    HW_RETURN_IF_ERROR(runner->Step());
    ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
  }
  const StepPhaseTimes phases = TakeStepPhaseTimes();
  int64_t sum = 0;
  for (const int64_t time : phases) sum += time;
  times.reduce_share = static_cast<double>(phases[static_cast<size_t>(StepPhase::kReduce)]) /
                       static_cast<double>(sum);
  std::ranges::sort(ms);
  times.ms_per_token = ms[ms.size() / 2];
  times.ids = runner->ids(kSequence);
  return runner->CheckSets(kSequence);
}

absl::Status AddTokenTimes(const ModelFile& file, int tokens, BenchJson& report) {
  const Ranks alone = CreateLocalGroup(1, kTimeout);
  RankTimes one;
  HW_RETURN_IF_ERROR(MeasureRank(file, *alone[0], tokens, one));
  HW_ASSIGN_OR_RETURN(const Ranks ranks, ConnectRanks("gloo"));
  std::vector<RankTimes> three(kRanks);
  HW_RETURN_IF_ERROR(OnEveryRank([&](int rank) {
    const auto index = static_cast<size_t>(rank);
    return MeasureRank(file, *ranks[index], tokens, three[index]);
  }));
  // Sums over ranks are rounded in another order than one rank's, so that later tokens
  // may differ from its own; never from one another's.
  for (const RankTimes& of_rank : three) {
    if (of_rank.ids == three[0].ids && of_rank.ids[0] == one.ids[0]) continue;
    return absl::InternalError("ranks chose other tokens than one another, or than one alone");
  }
  report["ranks"] = kRanks;
  report["cores"] = static_cast<int>(std::thread::hardware_concurrency());
  report["one_rank_ms_per_token"] = one.ms_per_token;
  report["ranks_ms_per_token"] = three[0].ms_per_token;
  report["vs_one_rank"] = three[0].ms_per_token / one.ms_per_token;
  report["reduce_share"] = three[0].reduce_share;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BenchJson> RunCommBench(const BenchOptions& options) {
  HW_RETURN_IF_ERROR(CheckHasModel(options));
  HW_ASSIGN_OR_RETURN(const auto file, OpenModel(options.model));
  BenchJson report = BenchJson::object();
  HW_RETURN_IF_ERROR(AddTokenTimes(*file, options.quick ? kQuickTokens : kTokens, report));
  report["rows"] = BenchJson::array();
  for (const char* communicator : {"local", "gloo"}) {
    HW_ASSIGN_OR_RETURN(Ranks ranks, ConnectRanks(communicator));
    for (const StepShape& shape : kShapes) {
      for (const Collective& collective : CollectivesOf(shape)) {
        HW_ASSIGN_OR_RETURN(BenchJson row, MeasureCollective(ranks, shape, collective,
                                                             options.quick ? kQuickCalls : kCalls));
        report["rows"].push_back(std::move(row));
      }
    }
  }
  return report;
}

}  // namespace heavywater
