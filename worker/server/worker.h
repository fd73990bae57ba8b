// One rank, put together: model, cache, communicator and the tie to the cache
// service.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/security/channels.h"
#include "heavywater/v1/config.pb.h"
#include "worker/comm/communicator.h"
#include "worker/model/llama_runner.h"
#include "worker/model/model_config.h"
#include "worker/model/model_file.h"
#include "worker/model/tokenizer.h"
#include "worker/rank/attention_engine.h"
#include "worker/server/cache_link.h"
#include "worker/server/command_runner.h"
#include "worker/server/connect_ranks.h"
#include "worker/server/generation_request.h"
#include "worker/server/kv_recorder.h"
#include "worker/server/peer_watch.h"
#include "worker/server/plan_reports.h"
#include "worker/server/remote_host_tier.h"
#include "worker/server/reporter.h"
#include "worker/server/snapshot_source.h"
#include "worker/server/trace_recorder.h"

namespace heavywater {

// What is known of a model before the group forms.
struct ModelFacts {
  std::unique_ptr<ModelFile> file;  // null, as the tokenizer: engines bring Q, K and V
  ModelConfig config;
  std::unique_ptr<Tokenizer> tokenizer;
  KvShape shape;  // of this rank
  v1::Fingerprint fingerprint;
};
absl::StatusOr<ModelFacts> ReadModelFacts(const v1::WorkerConfig& config);

// Whether `failure` means that a rank is gone, or stands still, and this one is to join
// anew. Ranks that disagree would do so again, and on a device what a collective left
// behind is not known: then the process ends.
bool MayFormAgain(const v1::WorkerConfig& config, const absl::Status& failure);

class Worker {
 public:
  // Joins the group (waits for the other ranks, until `stop`), connects to them,
  // loads the weights. `advertised_address`: where this rank listens. When a rank is lost
  // meanwhile, as Reform(). UNAVAILABLE, before it joins, naming a comm_address or
  // comm_interface that this machine does not have.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const v1::WorkerConfig& config,
                                                        const ModelFacts& facts,
                                                        const std::string& advertised_address,
                                                        const CommunicatorFactory& connect,
                                                        StopFlag& stop);
  ~Worker();

  CommandRunner& runner() { return *runner_; }    // where there is a model, while formed()
  AttentionEngine& engine() { return *engine_; }  // where there is none
  // Not after a Reform() that has failed: there is no runner, perhaps no communicator.
  bool formed() const { return runner_ != nullptr; }
  PlanReports& reports() { return *reports_; }
  Communicator& communicator() { return *communicator_; }
  RemoteHostTier* tier() { return tier_.get(); }  // null without a cache service
  // Why prompts of this formation cannot begin with stored pages; empty: they can. The same on
  // every rank.
  const std::string& no_prefix_reuse() const { return no_prefix_reuse_; }
  // A peer does not answer any more: the communicator is aborted.
  bool peer_lost() const { return peer_lost_; }
  // Where there are several cache services and the group's is lost: the formation ends, on this
  // thread and at the other ranks, and Reform() leads to another service. May be called at any
  // time while formed().
  void LeaveLostService();
  CacheLink* link() { return link_.get(); }         // null without a cache service
  Reporter* reporter() { return reporter_.get(); }  // likewise
  // The group has failed: lets go of what belongs to the formation that it was, open
  // sequences included, waits for the missing ranks (up to reform_timeout_ms, or
  // `stop`) and connects to them. The weights stay, and the host tier. Whether an error
  // comes of `stop` only `stop` says: a call that ends late is CANCELLED, too.
  absl::Status Reform(const v1::WorkerConfig& config, const ModelFacts& facts,
                      const CommunicatorFactory& connect, StopFlag& stop);
  // Gives pages and reports that are still on their way a moment to arrive.
  void Flush(absl::Duration timeout);
  // Leaves the group, which ends it for the other ranks, too.
  void Leave();

 private:
  Worker() = default;
  absl::Status JoinCacheService(const v1::WorkerConfig& config, const ModelFacts& facts,
                                const std::string& advertised_address, StopFlag& stop);
  absl::Status Connect(const v1::WorkerConfig& config, const CommunicatorFactory& connect);
  // One try at what follows upon joining; the weights are loaded by the first.
  absl::Status Form(const v1::WorkerConfig& config, const ModelFacts& facts,
                    const CommunicatorFactory& connect);
  void WatchPeers(const v1::WorkerConfig& config);
  absl::Status LoadModel(const v1::WorkerConfig& config, const ModelFacts& facts);
  // What acts for the group as it is formed now.
  absl::Status StartRunner(const v1::WorkerConfig& config);
  absl::Status AgreeOnPrefixReuse(const v1::WorkerConfig& config);
  absl::Status MakeEngine(const v1::WorkerConfig& config, const ModelFacts& facts);

  // Destroyed from the last to the first.
  std::unique_ptr<Channels> channels_;  // to the cache service and the other ranks
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<CacheLink> link_;
  std::unique_ptr<Reporter> reporter_;
  std::unique_ptr<RemoteHostTier> tier_;
  std::unique_ptr<SnapshotSource> snapshots_;
  std::unique_ptr<Communicator> communicator_;
  std::atomic<bool> peer_lost_ = false;
  std::vector<std::unique_ptr<PeerWatch>> watches_;
  Epoch epoch_ = 0;  // of the communicator
  std::string no_prefix_reuse_;
  std::unique_ptr<LlamaRunner> model_;
  std::unique_ptr<KvRecorder> recorder_;
  std::unique_ptr<TraceRecorder> traces_;
  std::unique_ptr<RankCache> cache_;
  std::unique_ptr<PlanReports> reports_;
  std::unique_ptr<CommandRunner> runner_;
  std::unique_ptr<AttentionEngine> engine_;
};

}  // namespace heavywater
