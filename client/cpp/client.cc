#include "client/cpp/client.h"

#include <grpcpp/grpcpp.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "client/cpp/channel.h"
#include "client/cpp/reading.h"

namespace heavywater {
namespace {

absl::Status NotConnected(const char* field) {
  return absl::FailedPreconditionError(
      absl::StrCat("this call needs ClientOptions::", field, ", which was not given"));
}

void SetDeadline(grpc::ClientContext& context, std::chrono::milliseconds timeout) {
  context.set_deadline(std::chrono::system_clock::now() + timeout);
}

// A set that exceeds a message comes in several, whose lists are appended.
absl::Status Append(std::vector<v1::SequenceSet>& sets, v1::SequenceSet& message) {
  if (!message.continued()) {
    sets.push_back(std::move(message));
    return absl::OkStatus();
  }
  message.set_continued(false);
  if (sets.empty() || sets.back().layer() != message.layer() ||
      sets.back().kv_head() != message.kv_head()) {
    return absl::DataLossError(absl::StrCat("GetSets goes on with layer ", message.layer(),
                                            ", kv_head ", message.kv_head(),
                                            ", whose first message did not come before it"));
  }
  sets.back().MergeFrom(message);
  return absl::OkStatus();
}

void Append(ModelDescription& model, v1::GetModelResponse& response) {
  if (response.has_model()) model.info = std::move(*response.mutable_model());
  for (v1::Piece& piece : *response.mutable_pieces()) model.pieces.push_back(std::move(piece));
  for (std::string& merge : *response.mutable_merges()) model.merges.push_back(std::move(merge));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  if (options.worker_address.empty() && options.cache_address.empty()) {
    return absl::InvalidArgumentError(
        "ClientOptions has neither worker_address nor cache_address, want one or both");
  }
  HW_ASSIGN_OR_RETURN(auto channels, Channels::Create(options.security));
  const auto channel = [&channels](const std::string& address) {
    return channels->Make(address, ClientChannelArguments());
  };
  std::unique_ptr<GenerationStub> generation;
  std::unique_ptr<SequenceStub> sequences;
  std::unique_ptr<PageStoreStub> pages;
  if (!options.worker_address.empty()) {
    HW_ASSIGN_OR_RETURN(const auto worker, channel(options.worker_address));
    generation = v1::GenerationService::NewStub(worker);
  }
  if (!options.cache_address.empty()) {
    HW_ASSIGN_OR_RETURN(const auto cache, channel(options.cache_address));
    sequences = v1::SequenceService::NewStub(cache);
    pages = v1::PageStoreService::NewStub(cache);
  }
  auto client = std::make_unique<Client>(
      std::move(generation), std::move(sequences), std::move(pages), options.timeout,
      [](std::chrono::milliseconds backoff) { std::this_thread::sleep_for(backoff); },
      options.resume_timeout);
  client->channels_ = std::move(channels);
  return client;
}

Client::Client(std::unique_ptr<GenerationStub> generation, std::unique_ptr<SequenceStub> sequences,
               std::unique_ptr<PageStoreStub> pages, std::chrono::milliseconds timeout,
               Sleeper sleep, std::chrono::milliseconds resume_timeout)
    : generation_(std::move(generation)),
      sequences_(std::move(sequences)),
      pages_(std::move(pages)),
      timeout_(timeout),
      sleep_(std::move(sleep)),
      resume_timeout_(resume_timeout) {}

absl::StatusOr<std::unique_ptr<Generation>> Client::Generate(const v1::GenerateRequest& request) {
  if (generation_ == nullptr) return NotConnected("worker_address");
  const auto generate = [this](const v1::GenerateRequest& again) {
    Generation::Call call;
    call.context = std::make_unique<grpc::ClientContext>();
    call.reader = generation_->Generate(call.context.get(), again);
    return call;
  };
  Generation::ResumeOptions resume;
  if (resume_timeout_.count() > 0) {
    resume = {
        .request = request, .generate = generate, .timeout = resume_timeout_, .sleep = sleep_};
  }
  return std::make_unique<Generation>(generate(request), std::move(resume));
}

absl::StatusOr<v1::GenerateSummary> Client::Generate(
    const v1::GenerateRequest& request,
    const std::function<bool(const v1::GenerateResponse&)>& on_token) {
  HW_ASSIGN_OR_RETURN(auto generation, Generate(request));
  while (true) {
    HW_ASSIGN_OR_RETURN(auto token, generation->Next());
    if (!token.has_value()) return generation->Summary();
    if (!on_token(*token)) return absl::CancelledError("cancelled by the caller");
  }
}

absl::StatusOr<ModelDescription> Client::GetModel() {
  if (generation_ == nullptr) return NotConnected("worker_address");
  return ReadWithRetries(sleep_, [this]() -> absl::StatusOr<ModelDescription> {
    grpc::ClientContext context;
    SetDeadline(context, timeout_);
    ModelDescription model;
    const auto reader = generation_->GetModel(&context, v1::GetModelRequest());
    HW_RETURN_IF_ERROR(Drain(*reader, [&model](v1::GetModelResponse& response) {
      Append(model, response);
      return absl::OkStatus();
    }));
    return model;
  });
}

absl::StatusOr<v1::OpenSequenceResponse> Client::Open(const v1::OpenSequenceRequest& request) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::OpenSequenceRequest identified = request;
  if (identified.request_id().empty()) identified.set_request_id(NewRequestId());
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::OpenSequenceResponse response;
  HW_RETURN_IF_ERROR(FromGrpc(sequences_->Open(&context, identified, &response)));
  return response;
}

absl::StatusOr<v1::Sequence> Client::Get(uint64_t sequence_id) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::GetSequenceRequest request;
  request.set_sequence_id(sequence_id);
  const auto read_page = [&]() -> absl::StatusOr<v1::Sequence> {
    grpc::ClientContext context;
    SetDeadline(context, timeout_);
    v1::Sequence sequence;
    HW_RETURN_IF_ERROR(FromGrpc(sequences_->Get(&context, request, &sequence)));
    return sequence;
  };
  HW_ASSIGN_OR_RETURN(v1::Sequence sequence, ReadWithRetries(sleep_, read_page));
  // As many as there were when the first page was read.
  while (sequence.tokens_size() < sequence.num_tokens()) {
    request.set_first_token(sequence.tokens_size());
    HW_ASSIGN_OR_RETURN(const v1::Sequence page, ReadWithRetries(sleep_, read_page));
    if (page.tokens().empty()) break;
    sequence.mutable_tokens()->MergeFrom(page.tokens());
  }
  return sequence;
}

absl::StatusOr<std::vector<v1::Sequence>> Client::List(const std::string& group) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::ListSequencesRequest request;
  request.set_group(group);
  const auto read_page = [&]() -> absl::StatusOr<v1::ListSequencesResponse> {
    grpc::ClientContext context;
    SetDeadline(context, timeout_);
    v1::ListSequencesResponse page;
    HW_RETURN_IF_ERROR(FromGrpc(sequences_->List(&context, request, &page)));
    return page;
  };
  std::vector<v1::Sequence> sequences;
  do {
    HW_ASSIGN_OR_RETURN(v1::ListSequencesResponse page, ReadWithRetries(sleep_, read_page));
    for (v1::Sequence& sequence : *page.mutable_sequences()) {
      sequences.push_back(std::move(sequence));
    }
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  return sequences;
}

absl::Status Client::Close(uint64_t sequence_id) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::CloseSequenceRequest request;
  request.set_sequence_id(sequence_id);
  request.set_request_id(NewRequestId());
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::CloseSequenceResponse response;
  return FromGrpc(sequences_->Close(&context, request, &response));
}

absl::StatusOr<v1::SuspendSequenceResponse> Client::Suspend(uint64_t sequence_id, int64_t ttl_ms) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::SuspendSequenceRequest request;
  request.set_sequence_id(sequence_id);
  request.set_ttl_ms(ttl_ms);
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::SuspendSequenceResponse response;
  const absl::Status status = FromGrpc(sequences_->Suspend(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::Resume(uint64_t sequence_id) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::ResumeSequenceRequest request;
  request.set_sequence_id(sequence_id);
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::ResumeSequenceResponse response;
  return FromGrpc(sequences_->Resume(&context, request, &response));
}

absl::StatusOr<v1::TruncateSequenceResponse> Client::Truncate(uint64_t sequence_id,
                                                              int64_t tokens) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::TruncateSequenceRequest request;
  request.set_sequence_id(sequence_id);
  request.set_tokens(tokens);
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::TruncateSequenceResponse response;
  const absl::Status status = FromGrpc(sequences_->Truncate(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::ForkSequenceResponse> Client::Fork(const v1::ForkSequenceRequest& request) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::ForkSequenceRequest identified = request;
  if (identified.request_id().empty()) identified.set_request_id(NewRequestId());
  grpc::ClientContext context;
  SetDeadline(context, timeout_);
  v1::ForkSequenceResponse response;
  const absl::Status status = FromGrpc(sequences_->Fork(&context, identified, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<std::vector<v1::SequenceSet>> Client::GetSets(uint64_t sequence_id,
                                                             const std::vector<int>& layers) {
  if (sequences_ == nullptr) return NotConnected("cache_address");
  v1::GetSetsRequest request;
  request.set_sequence_id(sequence_id);
  request.mutable_layers()->Assign(layers.begin(), layers.end());
  return ReadWithRetries(sleep_, [&]() -> absl::StatusOr<std::vector<v1::SequenceSet>> {
    grpc::ClientContext context;
    SetDeadline(context, timeout_);
    std::vector<v1::SequenceSet> sets;
    const auto reader = sequences_->GetSets(&context, request);
    HW_RETURN_IF_ERROR(Drain(*reader, [&sets](v1::SequenceSet& set) { return Append(sets, set); }));
    return sets;
  });
}

absl::StatusOr<std::string> Client::Read(const v1::ReadRequest& request) {
  if (pages_ == nullptr) return NotConnected("cache_address");
  return ReadWithRetries(sleep_, [&]() -> absl::StatusOr<std::string> {
    grpc::ClientContext context;
    SetDeadline(context, timeout_);
    std::string rows;
    const auto reader = pages_->Read(&context, request);
    HW_RETURN_IF_ERROR(Drain(*reader, [&rows](v1::ReadResponse& response) {
      rows.append(response.rows());
      return CheckRows(response);
    }));
    return rows;
  });
}

}  // namespace heavywater
