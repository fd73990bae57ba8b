#include "worker/server/page_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxChunkBytes = 1 << 20;
constexpr absl::Duration kShortTimeout = absl::Seconds(2);
constexpr absl::Duration kWriteTimeout = absl::Seconds(20);

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
}

void AddPages(const std::vector<PageId>& pages, v1::PageIds* ids) {
  for (const PageId& page : pages) {
    ids->add_layers(page.layer);
    ids->add_kv_heads(page.kv_head);
    ids->add_pages(page.page);
  }
}

}  // namespace

PageClient::PageClient(CacheLink& link) : link_(link) {}

absl::StatusOr<v1::AttachResponse> PageClient::Attach() {
  v1::AttachRequest request;
  request.set_group(link_.options().group);
  request.set_rank(link_.options().rank);
  request.set_epoch(link_.epoch());
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::AttachResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Attach(&context, request, &response));
  link_.Note(status);
  HW_RETURN_IF_ERROR(status);
  return response;
}

absl::StatusOr<v1::ReserveResponse> PageClient::Reserve(SequenceId sequence, HeadRange heads,
                                                        int64_t first_page, int64_t num_pages) {
  v1::ReserveRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  request.set_first_kv_head(heads.first);
  request.set_num_kv_heads(heads.count);
  request.set_first_page(first_page);
  request.set_num_pages(num_pages);
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::ReserveResponse response;
  const absl::Time sent = link_.clock().Now();
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Reserve(&context, request, &response));
  link_.Note(status);
  HW_RETURN_IF_ERROR(status);
  link_.NoteRenewed(sequence, sent);
  return response;
}

absl::Status PageClient::Write(SequenceId sequence, int row_bytes,
                               const std::vector<PageRows>& pages) {
  grpc::ClientContext context;
  SetTimeout(context, kWriteTimeout);
  v1::WriteResponse response;
  const auto service = link_.service();
  const auto writer = service->pages->Write(&context, &response);
  const int64_t rows_per_chunk = std::max<int64_t>(1, kMaxChunkBytes / row_bytes);
  bool open = true;
  for (const PageRows& page : pages) {
    const auto num_rows = static_cast<int64_t>(page.rows.size()) / row_bytes;
    for (int64_t row = 0; row < num_rows && open; row += rows_per_chunk) {
      const int64_t count = std::min(rows_per_chunk, num_rows - row);
      const auto bytes = page.rows.subspan(static_cast<size_t>(row * row_bytes),
                                           static_cast<size_t>(count * row_bytes));
      v1::WriteRequest request;
      request.set_sequence_id(sequence);
      request.set_epoch(link_.epoch());
      request.set_rank(link_.options().rank);
      request.set_layer(page.layer);
      request.set_kv_head(page.kv_head);
      request.set_first_position(page.first_position + row);
      request.set_rows(bytes.data(), bytes.size());
      request.set_crc32c(Crc32c(bytes));
      open = writer->Write(request);  // false: the call has ended, Finish() says why
    }
  }
  writer->WritesDone();
  const absl::Status status = FromGrpcStatus(writer->Finish());
  link_.Note(status);
  return status;
}

absl::Status PageClient::Commit(SequenceId sequence, int64_t tokens) {
  v1::CommitRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  request.set_tokens(tokens);
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::CommitResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Commit(&context, request, &response));
  link_.Note(status);
  return status;
}

absl::Status PageClient::Rest(SequenceId sequence, const std::vector<PageId>& pages) {
  v1::RestRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  AddPages(pages, request.mutable_pages());
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::RestResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Rest(&context, request, &response));
  link_.Note(status);
  return status;
}

// Not noted: that a tier below is away or slow does not mean that the service is.
absl::StatusOr<v1::AskResponse> PageClient::Ask(SequenceId sequence,
                                                const std::vector<PageId>& pages) {
  v1::AskRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  AddPages(pages, request.mutable_pages());
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::AskResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Ask(&context, request, &response));
  HW_RETURN_IF_ERROR(status);
  return response;
}

absl::Status PageClient::Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  v1::AbortRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  request.set_first_page(first_page);
  request.set_num_pages(num_pages);
  grpc::ClientContext context;
  SetTimeout(context, kShortTimeout);
  v1::AbortResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->pages->Abort(&context, request, &response));
  link_.Note(status);
  return status;
}

}  // namespace heavywater
