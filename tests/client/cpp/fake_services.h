// Services that answer the client in tests, over a real channel in this process.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_service/base/crc32c.h"
#include "heavywater/v1/generation.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"

namespace heavywater {

// Says "t0 t1 t2 ..." and a summary; goes on for ever when asked for more than
// kEndless tokens, until the call is cancelled.
class FakeGeneration final : public v1::GenerationService::Service {
 public:
  static constexpr int kEndless = 1'000'000;

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    if (request->text().empty()) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "text is empty, want text or tokens"};
    }
    requests.push_back(*request);
    v1::GenerateResponse accepted;
    accepted.set_sequence_id(7);
    if (breaks_before_accepting) return {grpc::StatusCode::UNAVAILABLE, "the group is not ready"};
    writer->Write(accepted);
    for (int i = request->resume().from_token(); i < request->max_new_tokens(); ++i) {
      if (breaks > 0 && i == breaks_at) {
        --breaks;
        return {grpc::StatusCode::UNAVAILABLE, "the worker group failed"};
      }
      v1::GenerateResponse response;
      response.set_token(100 + i);
      response.set_index(i);
      response.set_text("t" + std::to_string(i) + " ");
      if (!writer->Write(response) || context->IsCancelled()) {
        cancelled = true;
        return grpc::Status::CANCELLED;
      }
    }
    v1::GenerateResponse last;
    last.mutable_summary()->set_finish_reason("length");
    last.mutable_summary()->set_new_tokens(request->max_new_tokens());
    writer->Write(last);
    return grpc::Status::OK;
  }

  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest*,
                        grpc::ServerWriter<v1::GetModelResponse>* writer) override {
    v1::GetModelResponse first;
    first.mutable_model()->set_name("tiny");
    first.mutable_model()->set_vocab_size(3);
    writer->Write(first);
    for (const char* piece : {"a", "b", "ab"}) {
      v1::GetModelResponse part;
      part.add_pieces()->set_text(piece);
      writer->Write(part);
    }
    v1::GetModelResponse merges;
    merges.add_merges("a b");
    writer->Write(merges);
    return grpc::Status::OK;
  }

  std::atomic<bool> cancelled = false;
  // The stream ends with UNAVAILABLE so often, before token `breaks_at`.
  std::atomic<int> breaks = 0;
  int breaks_at = 0;
  bool breaks_before_accepting = false;
  std::vector<v1::GenerateRequest> requests;
};

// Knows the sequences 0 .. num_sequences - 1; fails its first `failures` calls
// with UNAVAILABLE.
class FakeSequences final : public v1::SequenceService::Service {
 public:
  explicit FakeSequences(int num_sequences) : num_sequences_(num_sequences) {}

  grpc::Status Open(grpc::ServerContext*, const v1::OpenSequenceRequest* request,
                    v1::OpenSequenceResponse* response) override {
    if (Fails()) return {grpc::StatusCode::UNAVAILABLE, "draining"};
    request_ids.push_back(request->request_id());
    response->set_sequence_id(num_sequences_);
    return grpc::Status::OK;
  }

  grpc::Status Get(grpc::ServerContext*, const v1::GetSequenceRequest* request,
                   v1::Sequence* sequence) override {
    if (Fails()) return {grpc::StatusCode::UNAVAILABLE, "draining"};
    if (request->sequence_id() >= static_cast<uint64_t>(num_sequences_)) {
      return {grpc::StatusCode::NOT_FOUND, "no such sequence"};
    }
    sequence->set_sequence_id(request->sequence_id());
    sequence->set_num_tokens(num_tokens);
    for (int64_t i = 0; i < 2 && request->first_token() + i < num_tokens; ++i) {
      sequence->add_tokens(static_cast<int32_t>(request->first_token() + i));
    }
    return grpc::Status::OK;
  }

  // Two sequences a page; the token is the next id.
  grpc::Status List(grpc::ServerContext*, const v1::ListSequencesRequest* request,
                    v1::ListSequencesResponse* response) override {
    const int first = request->page_token().empty() ? 0 : std::stoi(request->page_token());
    const int last = std::min(first + 2, num_sequences_);
    for (int id = first; id < last; ++id) response->add_sequences()->set_sequence_id(id);
    if (last < num_sequences_) response->set_next_page_token(std::to_string(last));
    return grpc::Status::OK;
  }

  grpc::Status Close(grpc::ServerContext*, const v1::CloseSequenceRequest* request,
                     v1::CloseSequenceResponse*) override {
    if (Fails()) return {grpc::StatusCode::UNAVAILABLE, "draining"};
    request_ids.push_back(request->request_id());
    return grpc::Status::OK;
  }

  grpc::Status Suspend(grpc::ServerContext*, const v1::SuspendSequenceRequest* request,
                       v1::SuspendSequenceResponse* response) override {
    suspended = request->sequence_id();
    response->set_ttl_ms(request->ttl_ms());
    return grpc::Status::OK;
  }

  grpc::Status Resume(grpc::ServerContext*, const v1::ResumeSequenceRequest* request,
                      v1::ResumeSequenceResponse*) override {
    if (request->sequence_id() != suspended) return {grpc::StatusCode::NOT_FOUND, "unknown"};
    suspended = 0;
    return grpc::Status::OK;
  }

  grpc::Status Fork(grpc::ServerContext*, const v1::ForkSequenceRequest* request,
                    v1::ForkSequenceResponse* response) override {
    forked = *request;
    response->set_sequence_id(request->sequence_id() + 1);
    return grpc::Status::OK;
  }
  grpc::Status Truncate(grpc::ServerContext*, const v1::TruncateSequenceRequest* request,
                        v1::TruncateSequenceResponse* response) override {
    truncated = {request->sequence_id(), request->tokens()};
    response->set_tokens_seen(request->tokens() - 1);
    return grpc::Status::OK;
  }

  grpc::Status GetSets(grpc::ServerContext*, const v1::GetSetsRequest* request,
                       grpc::ServerWriter<v1::SequenceSet>* writer) override {
    for (const int layer : request->layers()) {
      // Breaks off after the first message, so that a repeat must start anew.
      v1::SequenceSet set;
      set.set_layer(layer);
      set.add_heavy(1);
      writer->Write(set);
      if (Fails()) return {grpc::StatusCode::UNAVAILABLE, "draining"};
      set.set_layer(layer + (lose_first ? 1 : 0));
      set.set_heavy(0, 3);
      set.set_continued(true);
      writer->Write(set);
    }
    return grpc::Status::OK;
  }

  int64_t num_tokens = 5;  // of each, two a page
  uint64_t suspended = 0;  // the last one
  v1::ForkSequenceRequest forked;
  std::pair<uint64_t, int64_t> truncated;  // likewise, to so many tokens
  bool lose_first = false;                 // of a set in two messages
  int calls = 0;
  int failures = 0;
  std::vector<std::string> request_ids;

 private:
  bool Fails() { return calls++ < failures; }

  const int num_sequences_;
};

// Gives two chunks of rows, the second with a wrong checksum when `corrupt`.
class FakePages final : public v1::PageStoreService::Service {
 public:
  grpc::Status Read(grpc::ServerContext*, const v1::ReadRequest*,
                    grpc::ServerWriter<v1::ReadResponse>* writer) override {
    for (const char* rows : {"first", "second"}) {
      v1::ReadResponse response;
      response.set_rows(rows);
      response.set_crc32c(Crc32c(std::as_bytes(std::span(response.rows()))));
      if (corrupt && rows[0] == 's') response.set_crc32c(response.crc32c() ^ 1);
      writer->Write(response);
    }
    return grpc::Status::OK;
  }

  bool corrupt = false;
};

}  // namespace heavywater
