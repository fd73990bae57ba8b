// A worker group whose ranks are threads of the test: the real workers, over a
// local communicator.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "heavywater/v1/generation.pb.h"
#include "prometheus/registry.h"
#include "tests/worker/server/tiny_model.h"
#include "worker/server/rank_zero.h"
#include "worker/server/worker.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

// What a client got.
struct Generated {
  absl::Status status;
  std::vector<v1::GenerateResponse> messages;  // one per token
  v1::GenerateSummary summary;
  std::vector<int32_t> tokens() const;
  std::string text() const;
};

class ServerTestGroup {
 public:
  using Configure = std::function<void(v1::WorkerConfig&)>;

  // `configure` may change each rank's configuration.
  ServerTestGroup(const TinyModel& model, int size, const Configure& configure = nullptr);
  // Stops the ranks.
  ~ServerTestGroup();

  // Without a scheduler's thread: the test calls scheduler().RunOnce() itself
  // (size 1 only). Else rank 0 runs by itself.
  void Start();
  GenerationEngine& engine() { return ranks_[0]->zero->engine(); }
  Scheduler& scheduler() { return ranks_[0]->zero->scheduler(); }
  size_t num_queued() const { return ranks_[0]->zero->num_queued(); }
  Worker& worker(int rank) { return *ranks_[static_cast<size_t>(rank)]->worker; }
  // What Prometheus would read of a rank.
  std::string Metrics(int rank) const;
  const ModelFacts& facts() const { return ranks_[0]->facts; }
  // Of one rank's loop, once it has ended.
  const absl::Status& status(int rank) const { return ranks_[static_cast<size_t>(rank)]->status; }
  void Stop();

  // Starts, reads to the end, ends.
  Generated Generate(const v1::GenerateRequest& request);
  static Generated ReadAll(ServedGeneration& generation);

 private:
  struct Rank {
    ModelFacts facts;
    std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
    std::unique_ptr<WorkerMetrics> metrics;
    std::unique_ptr<Worker> worker;
    std::unique_ptr<RankZero> zero;
    std::thread thread;
    absl::Status status;
  };
  void Create(const v1::WorkerConfig& config, Communicator* communicator, Rank& rank);

  StopFlag stop_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<v1::WorkerConfig> configs_;
  bool running_ = false;
};

// `count` token ids that follow from `seed`.
std::vector<int32_t> SomeTokens(int count, int seed);
v1::GenerateRequest MakeRequest(const std::vector<int32_t>& prompt, int max_new_tokens);
// The same in 12 slots, where the policy evicts in decode.
v1::GenerateRequest Bounded(const std::vector<int32_t>& prompt, int max_new_tokens,
                            const std::string& policy = "snapkv_h2o");

}  // namespace heavywater
