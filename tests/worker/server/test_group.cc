#include "tests/worker/server/test_group.h"

#include <optional>
#include <utility>

#include "cache_service/base/check.h"
#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"
#include "worker/model/sampler.h"
#include "worker/server/follower.h"
#include "worker/server/policy_proto.h"

namespace heavywater {

std::vector<int32_t> Generated::tokens() const {
  std::vector<int32_t> tokens;
  for (const auto& message : messages) tokens.push_back(message.token());
  return tokens;
}

std::string Generated::text() const {
  std::string text;
  for (const auto& message : messages) text += message.text();
  return text;
}

ServerTestGroup::ServerTestGroup(const TinyModel& model, int size, const Configure& configure) {
  auto communicators = CreateLocalGroup(size, absl::Seconds(20));
  for (int rank = 0; rank < size; ++rank) {
    configs_.push_back(TinyConfig(model, rank, size));
    if (configure) configure(configs_.back());
    ranks_.push_back(std::make_unique<Rank>());
  }
  // Ranks load together: that is a collective.
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { Create(configs_[rank], communicators[rank].release(), *ranks_[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

void ServerTestGroup::Create(const v1::WorkerConfig& config, Communicator* communicator,
                             Rank& rank) {
  std::unique_ptr<Communicator> owned(communicator);
  const CommunicatorFactory connect =
      [&](const v1::WorkerConfig&, const std::string&, RendezvousStore*,
          Backend&) -> absl::StatusOr<std::unique_ptr<Communicator>> { return std::move(owned); };
  auto facts = ReadModelFacts(config);
  ASSERT_TRUE(facts.ok()) << facts.status();
  rank.facts = *std::move(facts);
  rank.metrics = std::make_unique<WorkerMetrics>(rank.registry);
  auto worker = Worker::Create(config, rank.facts, "127.0.0.1:1", connect, stop_);
  ASSERT_TRUE(worker.ok()) << worker.status();
  rank.worker = *std::move(worker);
  if (config.rank() != 0) return;
  rank.zero = std::make_unique<RankZero>(
      config, rank.facts, *ParseOnHostFull(config.on_host_full()), *rank.worker, *rank.metrics);
}

ServerTestGroup::~ServerTestGroup() {
  Stop();
  // One by one would leave a communicator's peers without a partner.
  for (auto& rank : ranks_) rank->zero.reset();
}

void ServerTestGroup::Start() {
  running_ = true;
  for (auto& rank : ranks_) {
    rank->thread = std::thread([&rank = *rank] {
      rank.status = rank.zero != nullptr
                        ? rank.zero->scheduler().Run()
                        : RunFollower(rank.worker->runner(), *rank.metrics, absl::Seconds(20));
    });
  }
}

void ServerTestGroup::Stop() {
  if (!std::exchange(running_, false)) return;
  scheduler().Stop();
  for (auto& rank : ranks_) rank->thread.join();
}

std::string ServerTestGroup::Metrics(int rank) const {
  return prometheus::TextSerializer().Serialize(
      ranks_[static_cast<size_t>(rank)]->registry->Collect());
}

Generated ServerTestGroup::Generate(const v1::GenerateRequest& request) {
  const auto generation = engine().Start(request);
  if (!generation.ok()) return {.status = generation.status(), .messages = {}, .summary = {}};
  Generated generated = ReadAll(**generation);
  engine().End(**generation, !generated.messages.empty());
  return generated;
}

Generated ServerTestGroup::ReadAll(ServedGeneration& generation) {
  Generated generated;
  while (!generation.responses.done()) {
    std::optional<v1::GenerateResponse> response = generation.responses.Pop(absl::Seconds(1));
    if (!response.has_value()) continue;
    if (response->has_summary()) {
      generated.summary = response->summary();
    } else {
      generated.messages.push_back(*std::move(response));
    }
  }
  generated.status = generation.responses.status();
  return generated;
}

std::vector<int32_t> SomeTokens(int count, int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(static_cast<int32_t>(
        UniformAt(static_cast<uint64_t>(seed), static_cast<uint64_t>(i)) * 256));
  }
  return tokens;
}

v1::GenerateRequest MakeRequest(const std::vector<int32_t>& prompt, int max_new_tokens) {
  v1::GenerateRequest request;
  request.mutable_tokens()->Assign(prompt.begin(), prompt.end());
  request.set_max_new_tokens(max_new_tokens);
  request.set_ignore_eos(true);
  return request;
}

v1::GenerateRequest Bounded(const std::vector<int32_t>& prompt, int max_new_tokens,
                            const std::string& policy) {
  v1::GenerateRequest request = MakeRequest(prompt, max_new_tokens);
  request.mutable_policy()->set_policy(policy);
  if (policy == "full" || policy == "snapkv") return request;
  request.mutable_policy()->set_heavy_tokens(6);
  request.mutable_policy()->set_recent_tokens(6);
  return request;
}

}  // namespace heavywater
