#include "worker/server/worker.h"

#include <unistd.h>

#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "worker/comm/gloo/listen_check.h"
#include "worker/model/cpu_llama_runner.h"
#include "worker/model/rank_shard.h"
#include "worker/rank/group_sum.h"
#include "worker/server/backoff.h"
#include "worker/server/engine_facts.h"
#include "worker/server/gpu.h"
#include "worker/server/group_rendezvous.h"
#include "worker/server/model_info.h"
#include "worker/server/worker_config.h"

namespace heavywater {
namespace {

void LogReload(const absl::Status& result) {
  if (result.ok()) {
    LogInfo("changed certificates are used for new connections to other servers");
  } else {
    LogError("changed certificates are no good; the old ones stay in use",
             {{"error", result.message()}});
  }
}

std::string NewInstanceName() {
  std::random_device random;
  return absl::StrCat(getpid(), "-", absl::Hex(random()), absl::Hex(random()));
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const v1::WorkerConfig& config) {
  if (config.backend() == "reference") return CreateReferenceBackend();
  if (config.backend() == "cuda") return CreateGpuBackend(config.device());
  return CreateCpuBackend({.num_threads = config.compute_threads(), .target = config.cpu_target()});
}

// Alike on all ranks: what it follows from is in their digest.
bool RestsPages(const v1::WorkerConfig& config) {
  return config.rest_pages() && config.backend() != "cuda" && !config.cache_address().empty();
}

// Between an engine's steps ranks say nothing to each other: that a peer has died shows
// in that it cannot be called any more.
PeerWatch::Ping PingOf(const v1::WorkerConfig& config, const std::string& address,
                       const Channels& channels) {
  const PeerWatch::Ping ping = MakeHealthPing(address, &channels);
  if (!ServesEngines(config)) return ping;
  return [ping](absl::Duration timeout) {
    const absl::Status status = ping(timeout);
    return absl::IsUnavailable(status) ? absl::DeadlineExceededError(status.message()) : status;
  };
}

absl::StatusOr<std::unique_ptr<LlamaRunner>> MakeRunner(const v1::WorkerConfig& config,
                                                        const ModelFile& file,
                                                        Communicator& communicator,
                                                        Backend& backend) {
  if (config.backend() == "cuda") {
    return CreateGpuRunner(file, communicator, backend,
                           {.device = config.device(),
                            .max_batch_tokens = config.prompt_chunk_tokens(),
                            .weights_dtype = config.weights_dtype()});
  }
  return CpuLlamaRunner::Create(
      file, communicator, backend,
      {.num_threads = config.compute_threads(), .max_batch_tokens = config.prompt_chunk_tokens()});
}

}  // namespace

absl::StatusOr<ModelFacts> ReadModelFacts(const v1::WorkerConfig& config) {
  ModelFacts facts;
  if (ServesEngines(config)) {
    HW_ASSIGN_OR_RETURN(facts.shape, EngineShape(config));
    facts.fingerprint = EngineFingerprint(config, facts.shape);
    return facts;
  }
  HW_ASSIGN_OR_RETURN(facts.file, OpenModel(config.model()));
  HW_ASSIGN_OR_RETURN(facts.config, facts.file->ReadConfig());
  HW_ASSIGN_OR_RETURN(TokenizerSpec spec, facts.file->ReadTokenizer());
  HW_RETURN_IF_ERROR(FillVocabulary(facts.config.vocab_size, spec));
  HW_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Create(std::move(spec)));
  facts.tokenizer = std::make_unique<Tokenizer>(std::move(tokenizer));
  HW_ASSIGN_OR_RETURN(const RankShard shard,
                      MakeRankShard(facts.config, config.rank(), config.size()));
  KvShape defaults;
  HW_ASSIGN_OR_RETURN(defaults.dtype, ParseKvDtype(config.kv_dtype()));
  defaults.page_tokens = config.page_tokens();
  facts.shape = MakeKvShape(facts.config, shard, defaults);
  HW_RETURN_IF_ERROR(facts.shape.Validate());
  facts.fingerprint = MakeFingerprint(facts.config, facts.file->Fingerprint(), facts.shape);
  return facts;
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const v1::WorkerConfig& config,
                                                       const ModelFacts& facts,
                                                       const std::string& advertised_address,
                                                       const CommunicatorFactory& connect,
                                                       StopFlag& stop) {
  auto worker = std::unique_ptr<Worker>(new Worker);
  HW_ASSIGN_OR_RETURN(worker->backend_, MakeBackend(config));
  HW_RETURN_IF_ERROR(worker->backend_->CheckShape(facts.shape));
  if (config.size() > 1) {
    HW_RETURN_IF_ERROR(CheckListens(config.comm_address(), config.comm_interface()));
  }
  HW_RETURN_IF_ERROR(worker->JoinCacheService(config, facts, advertised_address, stop));
  const absl::Status formed = worker->Form(config, facts, connect);
  if (formed.ok()) return worker;
  if (!MayFormAgain(config, formed) || stop.stopped()) return formed;
  LogWarn("the group has failed while it formed; joining it again",
          {{"group", config.group()}, {"error", formed.ToString()}});
  HW_RETURN_IF_ERROR(worker->Reform(config, facts, connect, stop));
  return worker;
}

bool MayFormAgain(const v1::WorkerConfig& config, const absl::Status& failure) {
  const bool lost = absl::IsUnavailable(failure) || absl::IsDeadlineExceeded(failure) ||
                    absl::IsAborted(failure) || absl::IsCancelled(failure);
  return lost && config.reform_timeout_ms() > 0 && !config.cache_address().empty() &&
         config.backend() != "cuda" && !ServesEngines(config);
}

Worker::~Worker() = default;

absl::Status Worker::JoinCacheService(const v1::WorkerConfig& config, const ModelFacts& facts,
                                      const std::string& advertised_address, StopFlag& stop) {
  if (config.cache_address().empty()) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(channels_, Channels::Create(ChannelSecurityOf(config), LogReload));
  std::vector<CacheAddress> services;
  for (const std::string& address : CacheAddressesOf(config)) {
    HW_ASSIGN_OR_RETURN(auto channel, channels_->Make(address, CacheChannelArguments()));
    services.push_back({address, std::move(channel)});
  }
  link_ = std::make_unique<CacheLink>(
      CacheLinkOptions{.services = std::move(services),
                       .failover = absl::Milliseconds(config.cache_failover_ms()),
                       .group = config.group(),
                       .rank = config.rank(),
                       .size = config.size(),
                       .instance = NewInstanceName(),
                       .advertised_address = advertised_address,
                       .fingerprint = facts.fingerprint,
                       .config_digest = ConfigDigest(config)});
  HW_RETURN_IF_ERROR(link_->Join(stop));
  link_->StartHeartbeats();
  LogInfo("joined the group", {{"group", config.group()},
                               {"rank", config.rank()},
                               {"size", config.size()},
                               {"epoch", link_->epoch()}});
  tier_ = std::make_unique<RemoteHostTier>(
      *link_, RemoteHostTierOptions{.disable_slab = config.disable_slab(),
                                    .reserve_ahead_tokens = config.reserve_ahead_tokens(),
                                    .backend = backend_.get()});
  reporter_ = std::make_unique<Reporter>(*link_, ReporterOptions{});
  snapshots_ = std::make_unique<SnapshotSource>(*link_);
  LogInfo("host tier attached", {{"pages", tier_->uses_slab() ? "in the slab" : "streamed"}});
  return absl::OkStatus();
}

absl::Status Worker::Connect(const v1::WorkerConfig& config, const CommunicatorFactory& connect) {
  std::unique_ptr<GroupRendezvous> store;
  std::string prefix;
  if (link_ != nullptr) {
    epoch_ = link_->epoch();
    store = std::make_unique<GroupRendezvous>(link_->service()->channel, config.group(), epoch_);
    prefix = absl::StrCat(config.group(), "/", epoch_, "/");
  }
  HW_ASSIGN_OR_RETURN(communicator_, connect(config, prefix, store.get(), *backend_));
  LogInfo("ranks connected", {{"communicator", communicator_->Name()}});
  WatchPeers(config);
  return absl::OkStatus();
}

// Rank 0 asks all others, they ask it: when it gives up, they see it leave.
void Worker::WatchPeers(const v1::WorkerConfig& config) {
  if (link_ == nullptr) return;
  const std::vector<std::string> addresses = link_->addresses();
  for (int rank = 0; rank < static_cast<int>(addresses.size()); ++rank) {
    if (rank == config.rank() || (rank != 0 && config.rank() != 0)) continue;
    watches_.push_back(std::make_unique<PeerWatch>(
        absl::StrCat("rank ", rank), absl::Milliseconds(config.peer_timeout_ms()),
        PingOf(config, addresses[static_cast<size_t>(rank)], *channels_),
        [this](absl::Status reason) {
          communicator_->Abort(std::move(reason));
          peer_lost_ = true;
        }));
  }
}

void Worker::LeaveLostService() {
  if (link_ == nullptr || !link_->lost() || communicator_ == nullptr) return;
  communicator_->Abort(
      absl::UnavailableError(absl::StrCat("the cache service at ", link_->service()->address,
                                          " is lost: the group goes on to another")));
}

absl::Status Worker::LoadModel(const v1::WorkerConfig& config, const ModelFacts& facts) {
  HW_ASSIGN_OR_RETURN(model_, MakeRunner(config, *facts.file, *communicator_, *backend_));
  if (!config.dump_dir().empty()) {
    recorder_ = std::make_unique<KvRecorder>(*model_, *backend_, facts.shape);
  }
  if (!config.record_dir().empty()) {
    if (!std::filesystem::is_directory(config.record_dir())) {
      return absl::InvalidArgumentError(
          absl::StrCat("record_dir is \"", config.record_dir(), "\", want a folder"));
    }
    traces_ = std::make_unique<TraceRecorder>(
        recorder_ == nullptr ? static_cast<Model&>(*model_) : *recorder_, *backend_, facts.shape,
        TraceRecorderOptions{.directory = config.record_dir(),
                             .model = facts.fingerprint.model(),
                             .rank = config.rank()});
  }
  HW_ASSIGN_OR_RETURN(cache_,
                      RankCache::Create({.shape = facts.shape,
                                         .rank = config.rank(),
                                         .world_size = config.size(),
                                         .hidden_size = facts.config.hidden_size,
                                         .vocab_size = facts.config.vocab_size,
                                         .device_memory_bytes = config.device_memory_bytes(),
                                         .max_step_tokens = config.prompt_chunk_tokens(),
                                         .reserve_ahead_tokens = config.reserve_ahead_tokens(),
                                         .rest_pages = RestsPages(config),
                                         .rope_frequencies = model_->RopeFrequencies(),
                                         .trained_tokens = facts.config.context_length},
                                        *backend_, tier_.get()));
  LogInfo("model loaded", {{"model", facts.fingerprint.model()}, {"backend", backend_->Name()}});
  return absl::OkStatus();
}

absl::Status Worker::Form(const v1::WorkerConfig& config, const ModelFacts& facts,
                          const CommunicatorFactory& connect) {
  HW_RETURN_IF_ERROR(Connect(config, connect));
  if (ServesEngines(config)) return MakeEngine(config, facts);
  if (cache_ == nullptr) {
    HW_RETURN_IF_ERROR(LoadModel(config, facts));
  } else {
    model_->SetCommunicator(*communicator_);
  }
  return StartRunner(config);
}

absl::Status Worker::StartRunner(const v1::WorkerConfig& config) {
  Model& recorded = recorder_ == nullptr ? static_cast<Model&>(*model_) : *recorder_;
  Model& model = traces_ == nullptr ? recorded : *traces_;
  if (traces_ != nullptr) traces_->Clear();  // of a group that has failed
  reports_ = std::make_unique<PlanReports>(*cache_, reporter_.get());
  runner_ = std::make_unique<CommandRunner>(
      *cache_, model, *communicator_, *reports_,
      CommandRunnerOptions{.copy_logits = config.rank() == 0,
                           .recorder = recorder_.get(),
                           .dump_dir = config.dump_dir(),
                           .traces = traces_.get(),
                           .tier = tier_.get(),
                           .snapshots = snapshots_.get(),
                           .take_snapshots = config.snapshot_interval_tokens() > 0});
  HW_RETURN_IF_ERROR(AgreeOnPrefixReuse(config));
  return communicator_->Barrier();
}

// Every rank must find the pages of its own heads in the slab, which its service or node may
// lack.
absl::Status Worker::AgreeOnPrefixReuse(const v1::WorkerConfig& config) {
  const bool records = recorder_ != nullptr || traces_ != nullptr;
  const std::vector<int64_t> own = {tier_ != nullptr, tier_ != nullptr && tier_->uses_slab(),
                                    !records, cache_->options().ranks_per_kv_head() == 1};
  HW_ASSIGN_OR_RETURN(const std::vector<int64_t> ranks,
                      SumOverRanks(own, *backend_, *communicator_, cache_->stream()));
  static constexpr const char* kReasons[] = {
      "there is no cache service", "a rank streams its pages, and cannot read them back",
      "a rank has dump_dir or record_dir, which want every row of a prompt computed",
      "there are more ranks than KV heads"};
  no_prefix_reuse_.clear();
  for (size_t i = 0; i < ranks.size() && no_prefix_reuse_.empty(); ++i) {
    if (ranks[i] < config.size()) no_prefix_reuse_ = kReasons[i];
  }
  return absl::OkStatus();
}

absl::Status Worker::Reform(const v1::WorkerConfig& config, const ModelFacts& facts,
                            const CommunicatorFactory& connect, StopFlag& stop) {
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config.reform_timeout_ms());
  Backoff backoff(absl::Milliseconds(100), absl::Seconds(2));
  absl::Status status;
  do {
    runner_.reset();  // closes what is open
    reports_.reset();
    watches_.clear();
    communicator_.reset();
    peer_lost_ = false;
    HW_RETURN_IF_ERROR(link_->Rejoin(epoch_, deadline - absl::Now(), stop));
    LogInfo("the group has formed again", {{"group", config.group()}, {"epoch", link_->epoch()}});
    status = Form(config, facts, connect);
    if (status.ok()) return status;
    runner_.reset();
    if (!MayFormAgain(config, status)) return status;
    LogWarn("the ranks did not connect; trying again", {{"error", status.ToString()}});
  } while (absl::Now() < deadline && !stop.WaitFor(backoff.Next()));
  return stop.stopped() ? absl::CancelledError("stopped while the group forms again") : status;
}

absl::Status Worker::MakeEngine(const v1::WorkerConfig& config, const ModelFacts& facts) {
  HW_ASSIGN_OR_RETURN(const int step_tokens, EngineStepTokens(config, facts.shape));
  HW_ASSIGN_OR_RETURN(
      cache_,
      RankCache::Create({.shape = facts.shape,
                         .rank = config.rank(),
                         .world_size = config.size(),
                         .device_memory_bytes = config.device_memory_bytes(),
                         .max_step_tokens = step_tokens,
                         .reserve_ahead_tokens = config.reserve_ahead_tokens(),
                         .rest_pages = RestsPages(config),
                         .attention_scale = static_cast<float>(config.engine_attention_scale())},
                        *backend_, tier_.get()));
  reports_ = std::make_unique<PlanReports>(*cache_, reporter_.get());
  engine_ = std::make_unique<AttentionEngine>(*cache_, *communicator_);
  LogInfo("waiting for an engine",
          {{"model", facts.fingerprint.model()}, {"backend", backend_->Name()}});
  return communicator_->Barrier();
}

void Worker::Flush(absl::Duration timeout) {
  if (link_ == nullptr) return;
  const absl::Time deadline = absl::Now() + timeout;
  if (link_->up() && !tier_->Flush(timeout)) LogWarn("host pages were not handed over in time");
  if (link_->up() && !reporter_->Flush(deadline - absl::Now())) {
    LogWarn("reports were not delivered in time", {{"reports", reporter_->queued()}});
  }
}

void Worker::Leave() {
  if (link_ != nullptr) link_->Leave();
}

}  // namespace heavywater
