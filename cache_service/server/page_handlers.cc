#include "cache_service/server/page_handlers.h"

#include <algorithm>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/registry/validate.h"
#include "cache_service/server/run_in_tier.h"

namespace heavywater {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

// What was there a chunk ago and is gone now has lost its lease.
absl::Status LostMeanwhile(const absl::Status& status) {
  return absl::AbortedError(status.message());
}

}  // namespace

absl::StatusOr<v1::AttachResponse> PageHandlers::Attach(const v1::AttachRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.groups().CheckRank(request.group(), request.rank(), request.epoch()));
  v1::AttachResponse response;
  response.set_format_version(kSlabFormatVersion);
  if (slab_ == nullptr) return response;
  HW_RETURN_IF_ERROR(registry_.AttachDirect(request.group(), request.rank(), request.epoch()));
  response.set_slab_name(slab_->name());
  response.set_slab_bytes(slab_->object_bytes());
  response.set_slab_nonce(slab_->nonce());
  return response;
}

absl::StatusOr<v1::ReserveResponse> PageHandlers::Reserve(const v1::ReserveRequest& request) {
  const SequenceId sequence = request.sequence_id();
  const int rank = request.rank();
  HW_ASSIGN_OR_RETURN(const bool direct, registry_.AdmitWriter(sequence, rank, request.epoch()));
  const PageRange range = {.sequence = request.sequence_id(),
                           .rank = request.rank(),
                           .heads = {request.first_kv_head(), request.num_kv_heads()},
                           .first_page = request.first_page(),
                           .num_pages = request.num_pages()};
  absl::StatusOr<Reservation> reservation = store_.Reserve(range, direct);
  while (absl::IsResourceExhausted(reservation.status())) {
    HW_RETURN_IF_ERROR(registry_.sequences().MakeRoom(reservation.status()));
    HW_RETURN_IF_ERROR(registry_.CheckWriter(sequence, rank, request.epoch()).status());
    reservation = store_.Reserve(range, direct);
  }
  HW_RETURN_IF_ERROR(reservation.status());
  registry_.StopIfFinished(sequence, rank);
  // It may have waited for the tiers below, and its process been replaced: then these are
  // its successor's pages.
  HW_RETURN_IF_ERROR(registry_.CheckWriter(sequence, rank, request.epoch()).status());
  v1::ReserveResponse response;
  response.mutable_offsets()->Add(reservation->offsets.begin(), reservation->offsets.end());
  response.set_watermark_offset(reservation->watermark_offset);
  return response;
}

absl::StatusOr<std::vector<PageId>> PageHandlers::PagesOf(const v1::PageIds& ids) {
  HW_RETURN_IF_ERROR(CheckInt("pages", ids.pages_size(), 1, kMaxPagesPerRest));
  HW_RETURN_IF_ERROR(CheckInt("layers", ids.layers_size(), ids.pages_size(), ids.pages_size()));
  HW_RETURN_IF_ERROR(CheckInt("kv_heads", ids.kv_heads_size(), ids.pages_size(), ids.pages_size()));
  std::vector<PageId> pages;
  for (int i = 0; i < ids.pages_size(); ++i) {
    pages.push_back({ids.layers(i), ids.kv_heads(i), ids.pages(i)});
  }
  return pages;
}

absl::Status PageHandlers::Rest(const v1::RestRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.CheckWriter(request.sequence_id(), request.rank(), request.epoch()).status());
  HW_ASSIGN_OR_RETURN(const std::vector<PageId> pages, PagesOf(request.pages()));
  return store_.Rest(request.sequence_id(), request.rank(), pages);
}

absl::StatusOr<v1::AskResponse> PageHandlers::Ask(const v1::AskRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.CheckWriter(request.sequence_id(), request.rank(), request.epoch()).status());
  HW_ASSIGN_OR_RETURN(const std::vector<PageId> pages, PagesOf(request.pages()));
  HW_ASSIGN_OR_RETURN(const std::vector<absl::StatusOr<int64_t>> asked,
                      store_.Ask(request.sequence_id(), request.rank(), pages));
  v1::AskResponse response;
  for (const absl::StatusOr<int64_t>& offset : asked) {
    response.add_offsets(offset.ok() ? *offset : -1);
    response.add_codes(static_cast<int>(offset.status().code()));
  }
  return response;
}

absl::Status PageHandlers::RunForReserve(const v1::ReserveRequest& request,
                                         std::function<void()> work) {
  const int tier = store_.LowestTierOf({.sequence = request.sequence_id(),
                                        .rank = request.rank(),
                                        .heads = {request.first_kv_head(), request.num_kv_heads()},
                                        .first_page = request.first_page(),
                                        .num_pages = request.num_pages()});
  return RunInTier(tier_threads_, tier, std::move(work));
}

absl::Status PageHandlers::RunForAsk(const v1::AskRequest& request, std::function<void()> work) {
  // What is wrong with it is for Ask() to say.
  const absl::StatusOr<std::vector<PageId>> pages = PagesOf(request.pages());
  const int tier = pages.ok() ? store_.LowestTierOf(request.sequence_id(), *pages) : int{kHostTier};
  return RunInTier(tier_threads_, tier, std::move(work));
}

absl::StatusOr<int64_t> PageHandlers::WriteChunk(const v1::WriteRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.CheckWriter(request.sequence_id(), request.rank(), request.epoch()).status());
  HW_RETURN_IF_ERROR(CheckText("rows", request.rows(), 1, kMaxChunkBytes));
  const uint32_t crc = Crc32c(Bytes(request.rows()));
  if (crc != request.crc32c()) {
    return absl::DataLossError(absl::StrCat("crc32c is ", request.crc32c(), ", the ",
                                            request.rows().size(), " bytes of rows have ", crc));
  }
  HW_ASSIGN_OR_RETURN(const SequenceRegistry::Owner owner,
                      registry_.sequences().FindOwner(request.sequence_id()));
  HW_ASSIGN_OR_RETURN(const PageGeometry geometry, GeometryOf(owner.fingerprint));
  const int64_t num_rows = static_cast<int64_t>(request.rows().size()) / geometry.row_bytes;
  const RowRange rows = {.sequence = request.sequence_id(),
                         .layer = request.layer(),
                         .kv_head = request.kv_head(),
                         .first_position = request.first_position(),
                         .num_positions = std::max<int64_t>(1, num_rows)};
  HW_RETURN_IF_ERROR(store_.Write(request.rank(), rows, Bytes(request.rows())));
  return num_rows;
}

absl::Status PageHandlers::Commit(const v1::CommitRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.CheckWriter(request.sequence_id(), request.rank(), request.epoch()).status());
  HW_RETURN_IF_ERROR(store_.Commit(request.sequence_id(), request.rank(), request.tokens()));
  registry_.sequences().NoteCommit(request.sequence_id());
  return absl::OkStatus();
}

absl::StatusOr<v1::AbortResponse> PageHandlers::Abort(const v1::AbortRequest& request) {
  HW_RETURN_IF_ERROR(
      registry_.CheckWriter(request.sequence_id(), request.rank(), request.epoch()).status());
  const absl::StatusOr<int64_t> freed =
      request.num_pages() == 0 && request.first_page() == 0
          ? store_.Abort(request.sequence_id(), request.rank())
          : store_.Skip(request.sequence_id(), request.rank(), request.first_page(),
                        request.num_pages());
  HW_RETURN_IF_ERROR(freed.status());
  v1::AbortResponse response;
  response.set_pages_freed(*freed);
  return response;
}

absl::Status PageHandlers::StartRead(const v1::ReadRequest& request, const Viewer& viewer) {
  HW_ASSIGN_OR_RETURN(const SequenceRegistry::Owner owner,
                      registry_.sequences().FindOwner(request.sequence_id(), viewer));
  HW_RETURN_IF_ERROR(
      CheckInt("num_positions", request.num_positions(), 1, owner.fingerprint.page_tokens()));
  registry_.sequences().NoteUse(request.sequence_id());
  if (!request.has_fingerprint()) return absl::OkStatus();
  return CompareFingerprints(request.fingerprint(), "the request has", owner.fingerprint,
                             "the sequence has");
}

absl::Status PageHandlers::RunForChunk(const v1::ReadRequest& request, int64_t done,
                                       std::function<void()> work) {
  const int tier = store_.TierOf({.sequence = request.sequence_id(),
                                  .layer = request.layer(),
                                  .kv_head = request.kv_head(),
                                  .first_position = request.first_position() + done});
  return RunInTier(tier_threads_, tier, std::move(work));
}

absl::StatusOr<int64_t> PageHandlers::NextChunk(const v1::ReadRequest& request, int64_t done,
                                                v1::ReadResponse* chunk) {
  const auto owner = registry_.sequences().FindOwner(request.sequence_id());
  if (!owner.ok()) return done == 0 ? owner.status() : LostMeanwhile(owner.status());
  HW_ASSIGN_OR_RETURN(const PageGeometry geometry, GeometryOf(owner->fingerprint));
  const int64_t max_rows = std::max<int64_t>(1, kMaxChunkBytes / geometry.row_bytes);
  const RowRange rows = {.sequence = request.sequence_id(),
                         .layer = request.layer(),
                         .kv_head = request.kv_head(),
                         .first_position = request.first_position() + done,
                         .num_positions = std::min(max_rows, request.num_positions() - done)};
  std::string& bytes = *chunk->mutable_rows();
  bytes.resize(rows.num_positions * geometry.row_bytes);
  const absl::Status status = store_.Read(rows, std::as_writable_bytes(std::span<char>(bytes)));
  if (absl::IsNotFound(status) && done > 0) return LostMeanwhile(status);
  HW_RETURN_IF_ERROR(status);
  chunk->set_first_position(rows.first_position);
  chunk->set_crc32c(Crc32c(Bytes(bytes)));
  return rows.num_positions;
}

}  // namespace heavywater
