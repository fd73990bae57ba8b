#include "tests/bench/stream_case.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/server/cache_config.h"
#include "cache_service/server/cache_server.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"

namespace heavywater {
namespace {

constexpr int kHeadDim = 128;
constexpr int64_t kRowBytes = 2 * kHeadDim * 2;  // bf16
constexpr int64_t kChunkBytes = 1 << 20;

uint32_t Crc(const std::string& text) {
  return Crc32c(std::as_bytes(std::span<const char>(text)));
}

// The client's side, which is the same for both.
class Streams : public StreamCase {
 public:
  Streams(int64_t page_bytes, bool checks) : page_bytes_(page_bytes), checks_(checks) {}

  absl::Status Put(const std::vector<std::vector<std::byte>>& pages) override {
    grpc::ClientContext context;
    v1::WriteResponse response;
    const auto stream = stub_->Write(&context, &response);
    for (size_t page = 0; page < pages.size(); ++page) {
      for (int64_t first = 0; first < page_bytes_; first += kChunkBytes) {
        if (!stream->Write(ChunkOf(pages[page], static_cast<int64_t>(page), first))) break;
      }
    }
    stream->WritesDone();
    return FromGrpcStatus(stream->Finish());
  }

  absl::Status Get(int page, std::span<std::byte> bytes) override {
    v1::ReadRequest request;
    request.set_sequence_id(sequence_);
    request.set_first_position(page * tokens());
    request.set_num_positions(tokens());
    grpc::ClientContext context;
    const auto stream = stub_->Read(&context, request);
    v1::ReadResponse chunk;
    size_t done = 0;
    while (stream->Read(&chunk)) {
      if (done + chunk.rows().size() > bytes.size()) return absl::DataLossError("too many rows");
      if (checks_ && Crc(chunk.rows()) != chunk.crc32c()) return absl::DataLossError("a chunk");
      std::memcpy(bytes.data() + done, chunk.rows().data(), chunk.rows().size());
      done += chunk.rows().size();
    }
    HW_RETURN_IF_ERROR(FromGrpcStatus(stream->Finish()));
    if (done == bytes.size()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(done, " bytes came, want ", bytes.size()));
  }

 protected:
  int64_t tokens() const { return page_bytes_ / kRowBytes; }

  void Connect(const std::string& address) {
    channel_ = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    stub_ = v1::PageStoreService::NewStub(channel_);
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::PageStoreService::Stub> stub_;
  uint64_t sequence_ = 0;
  uint64_t epoch_ = 0;

 private:
  v1::WriteRequest ChunkOf(const std::vector<std::byte>& page, int64_t number, int64_t first) {
    const int64_t size = std::min(kChunkBytes, page_bytes_ - first);
    v1::WriteRequest chunk;
    chunk.set_sequence_id(sequence_);
    chunk.set_epoch(epoch_);
    chunk.set_first_position(number * tokens() + first / kRowBytes);
    chunk.set_rows(page.data() + first, static_cast<size_t>(size));
    if (checks_) chunk.set_crc32c(Crc(chunk.rows()));
    return chunk;
  }

  const int64_t page_bytes_;
  const bool checks_;
};

class ServiceStream final : public Streams {
 public:
  ServiceStream(int64_t page_bytes, int pages)
      : Streams(page_bytes, /*checks=*/true), pages_(pages) {}

  absl::Status Start(int64_t page_bytes) {
    HW_RETURN_IF_ERROR(InitLogging({.level = "error", .process = "bench"}));
    v1::CacheConfig config = DefaultCacheConfig();
    config.set_listen_address("127.0.0.1:0");
    config.set_metrics_address("");
    config.set_disable_slab(true);
    config.set_host_bytes(pages_ * page_bytes + (4 << 20));
    config.set_drain_ms(0);
    // The benchmark goes on for longer than a rank's lease.
    config.set_rank_lease_ms(3'600'000);
    config.set_sequence_lease_ms(3'600'000);
    HW_ASSIGN_OR_RETURN(server_, CacheServer::Start(config));
    Connect(server_->address());
    return OpenPages();
  }

  absl::Status MakeReadable() override {
    v1::CommitRequest request;
    request.set_sequence_id(sequence_);
    request.set_epoch(epoch_);
    request.set_tokens(pages_ * tokens());
    grpc::ClientContext context;
    v1::CommitResponse response;
    return FromGrpcStatus(stub_->Commit(&context, request, &response));
  }

 private:
  v1::Fingerprint FingerprintOf() const {
    v1::Fingerprint fingerprint;
    fingerprint.set_model("bench");
    fingerprint.set_dtype("bf16");
    fingerprint.set_num_layers(1);
    fingerprint.set_num_kv_heads(1);
    fingerprint.set_head_dim(kHeadDim);
    fingerprint.set_rope("10000");
    fingerprint.set_positions("absolute");
    fingerprint.set_page_tokens(static_cast<int>(tokens()));
    fingerprint.set_format_version(1);
    return fingerprint;
  }

  absl::Status OpenPages() {
    const auto groups = v1::GroupService::NewStub(channel_);
    v1::JoinRequest join;
    join.set_group("bench");
    join.set_size(1);
    join.set_instance("bench");
    *join.mutable_fingerprint() = FingerprintOf();
    join.set_config_digest("bench");
    join.set_advertised_address("127.0.0.1:1");
    grpc::ClientContext join_context;
    v1::JoinResponse joined;
    HW_RETURN_IF_ERROR(FromGrpcStatus(groups->Join(&join_context, join, &joined)));
    epoch_ = joined.epoch();
    const auto sequences = v1::SequenceService::NewStub(channel_);
    v1::OpenSequenceRequest open;
    open.set_request_id("bench");
    open.set_group("bench");
    open.set_epoch(epoch_);
    *open.mutable_fingerprint() = FingerprintOf();
    open.mutable_budget()->set_policy("full");
    open.mutable_budget()->set_scope("layer");
    open.set_prompt_tokens(1);
    open.set_max_tokens(pages_ * tokens());
    grpc::ClientContext open_context;
    v1::OpenSequenceResponse opened;
    HW_RETURN_IF_ERROR(FromGrpcStatus(sequences->Open(&open_context, open, &opened)));
    sequence_ = opened.sequence_id();
    v1::ReserveRequest reserve;
    reserve.set_sequence_id(sequence_);
    reserve.set_epoch(epoch_);
    reserve.set_num_kv_heads(1);
    reserve.set_num_pages(pages_);
    grpc::ClientContext reserve_context;
    v1::ReserveResponse reserved;
    return FromGrpcStatus(stub_->Reserve(&reserve_context, reserve, &reserved));
  }

  const int pages_;
  std::unique_ptr<CacheServer> server_;
};

// Takes rows and gives them back; knows nothing of pages.
class BareService final : public v1::PageStoreService::CallbackService {
 public:
  explicit BareService(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {}

  grpc::ServerReadReactor<v1::WriteRequest>* Write(grpc::CallbackServerContext*,
                                                   v1::WriteResponse*) override {
    class Taker final : public grpc::ServerReadReactor<v1::WriteRequest> {
     public:
      explicit Taker(BareService& service) : service_(service) { StartRead(&chunk_); }
      void OnReadDone(bool ok) override {
        if (!ok) return Finish(grpc::Status::OK);
        std::memcpy(service_.memory_.data() + chunk_.first_position() * kRowBytes,
                    chunk_.rows().data(), chunk_.rows().size());
        StartRead(&chunk_);
      }
      void OnDone() override { delete this; }

     private:
      BareService& service_;
      v1::WriteRequest chunk_;
    };
    return new Taker(*this);
  }

  grpc::ServerWriteReactor<v1::ReadResponse>* Read(grpc::CallbackServerContext*,
                                                   const v1::ReadRequest* request) override {
    class Giver final : public grpc::ServerWriteReactor<v1::ReadResponse> {
     public:
      Giver(BareService& service, const v1::ReadRequest& request)
          : service_(service),
            next_(request.first_position() * kRowBytes),
            end_(next_ + request.num_positions() * kRowBytes) {
        OnWriteDone(true);
      }
      void OnWriteDone(bool ok) override {
        if (!ok || next_ == end_) return Finish(ok ? grpc::Status::OK : grpc::Status::CANCELLED);
        const int64_t size = std::min(kChunkBytes, end_ - next_);
        chunk_.set_rows(service_.memory_.data() + next_, static_cast<size_t>(size));
        next_ += size;
        StartWrite(&chunk_);
      }
      void OnDone() override { delete this; }

     private:
      BareService& service_;
      int64_t next_;
      const int64_t end_;
      v1::ReadResponse chunk_;
    };
    return new Giver(*this, *request);
  }

 private:
  std::vector<std::byte> memory_;
};

class BareStream final : public Streams {
 public:
  BareStream(int64_t page_bytes, int pages)
      : Streams(page_bytes, /*checks=*/false), service_(page_bytes * pages) {}
  ~BareStream() override { server_->Shutdown(std::chrono::system_clock::now()); }

  absl::Status Start() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) return absl::UnavailableError("no server can be started");
    Connect(absl::StrCat("127.0.0.1:", port));
    return absl::OkStatus();
  }
  absl::Status MakeReadable() override { return absl::OkStatus(); }

 private:
  BareService service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StreamCase>> MakeServiceStream(int64_t page_bytes, int pages) {
  auto stream = std::make_unique<ServiceStream>(page_bytes, pages);
  HW_RETURN_IF_ERROR(stream->Start(page_bytes));
  return std::unique_ptr<StreamCase>(std::move(stream));
}

absl::StatusOr<std::unique_ptr<StreamCase>> MakeBareStream(int64_t page_bytes, int pages) {
  auto stream = std::make_unique<BareStream>(page_bytes, pages);
  const absl::Status started = stream->Start();
  if (!started.ok()) return started;
  return std::unique_ptr<StreamCase>(std::move(stream));
}

}  // namespace heavywater
