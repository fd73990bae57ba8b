#include "cache_service/cluster/sequence_copier.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/tier/page_coding.h"

namespace heavywater {
namespace {

// What is on its way at a time.
constexpr int64_t kBatchBytes = 4 << 20;
// Others may take what was made free.
constexpr int kRoomTries = 8;

absl::Status CheckPart(const v1::CopiedPart& part, int num_ranks, const PageGeometry& geometry,
                       int64_t max_tokens) {
  if (part.rank() >= 0 && part.rank() < num_ranks && part.first_kv_head() >= 0 &&
      part.num_kv_heads() >= 1 &&
      part.first_kv_head() <= geometry.num_kv_heads - part.num_kv_heads() &&
      part.num_positions() >= 0 && part.num_positions() <= max_tokens) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("a copy has an impossible part: ", part.ShortDebugString()));
}

// A fork that no rank has opened yet has pages of nobody: a copy would lack them.
absl::Status CheckWhole(SequenceId id, const std::vector<WrittenPart>& parts, int num_kv_heads) {
  std::vector<bool> covered(static_cast<size_t>(num_kv_heads), false);
  for (const WrittenPart& part : parts) {
    for (int head = part.heads.first; head < part.heads.first + part.heads.count; ++head) {
      covered[static_cast<size_t>(head)] = true;
    }
  }
  if (std::find(covered.begin(), covered.end(), false) == covered.end()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "sequence ", id, " has pages that no rank has opened since it was forked: a turn does so"));
}

}  // namespace

// What the pages of a sequence have in common.
struct SequenceCopier::Pages {
  static absl::StatusOr<Pages> Of(SequenceId id, const v1::SequenceState& state) {
    const v1::Fingerprint& fingerprint = state.request().fingerprint();
    HW_ASSIGN_OR_RETURN(const PageGeometry geometry, GeometryOf(fingerprint));
    return Pages{id, FingerprintIdOf(fingerprint), geometry};
  }

  // Pages in the order in which they are copied, a page of all layers and heads after the other.
  template <typename Visit>
  absl::Status ForEach(const WrittenPart& part, Visit visit) const {
    const int64_t num_pages = geometry.PagesFor(part.num_positions);
    for (int64_t page = 0; page < num_pages; ++page) {
      for (int layer = 0; layer < geometry.num_layers; ++layer) {
        for (int head = part.heads.first; head < part.heads.first + part.heads.count; ++head) {
          HW_RETURN_IF_ERROR(visit(PageKey{id, fingerprint, layer, head, page}));
        }
      }
    }
    return absl::OkStatus();
  }

  // The part's rows of the page.
  RowRange RowsOf(const PageKey& key, const WrittenPart& part) const {
    const int64_t first = key.page * geometry.page_tokens;
    return {.sequence = id,
            .layer = key.layer,
            .kv_head = key.kv_head,
            .first_position = first,
            .num_positions = std::min<int64_t>(geometry.page_tokens, part.num_positions - first)};
  }

  SequenceId id;
  FingerprintId fingerprint;
  PageGeometry geometry;
};

absl::Status SequenceCopier::CopyPartOut(const Pages& pages, const WrittenPart& part,
                                         const std::string& name, absl::Duration ttl,
                                         v1::CopyRecord* copy) {
  const int64_t page_bytes = pages.geometry.page_bytes();
  const size_t batch = static_cast<size_t>(std::max<int64_t>(1, kBatchBytes / page_bytes));
  std::vector<std::byte> memory(batch * static_cast<size_t>(page_bytes));
  std::vector<PageCopy> copies;
  const auto send = [&]() -> absl::Status {
    HW_RETURN_IF_ERROR(copies_.PutPages(name, copies, ttl));
    copies.clear();
    return absl::OkStatus();
  };
  HW_RETURN_IF_ERROR(pages.ForEach(part, [&](const PageKey& key) -> absl::Status {
    const auto bytes = std::span(memory).subspan(copies.size() * static_cast<size_t>(page_bytes),
                                                 static_cast<size_t>(page_bytes));
    const RowRange rows = pages.RowsOf(key, part);
    const size_t used = static_cast<size_t>(rows.num_positions * pages.geometry.row_bytes);
    HW_RETURN_IF_ERROR(store_.Read(rows, bytes.first(used)));
    std::memset(bytes.data() + used, 0, bytes.size() - used);
    copies.push_back({key, bytes, Crc32c(bytes)});
    copy->set_pages(copy->pages() + 1);
    copy->set_bytes(copy->bytes() + page_bytes);
    return copies.size() == batch ? send() : absl::OkStatus();
  }));
  return copies.empty() ? absl::OkStatus() : send();
}

absl::StatusOr<v1::CopyRecord> SequenceCopier::CopyOut(SequenceId id, const std::string& name,
                                                       int64_t max_bytes, absl::Duration ttl) {
  auto before = sequences_.Export(id, /*with_state=*/true);
  if (!before.has_value()) return absl::NotFoundError(absl::StrCat("sequence ", id, " has ended"));
  if (store_.SequenceBytes(id) > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sequence ", id, " has ", store_.SequenceBytes(id), " bytes of pages, ",
                     max_bytes, " are left for copies (remote_copy_bytes)"));
  }
  HW_ASSIGN_OR_RETURN(const Pages pages, Pages::Of(id, before->state));
  HW_ASSIGN_OR_RETURN(const std::vector<WrittenPart> parts, store_.Written(id));
  HW_RETURN_IF_ERROR(CheckWhole(id, parts, pages.geometry.num_kv_heads));
  v1::CopyRecord copy;
  copy.set_id(name);
  copy.set_incarnation(before->incarnation);
  copy.set_num_tokens(before->num_tokens);
  copy.set_expires_ms(absl::ToUnixMillis(absl::Now() + ttl));
  v1::SequenceCopyState state;
  *state.mutable_sequence() = std::move(before->state);
  for (const WrittenPart& part : parts) {
    HW_RETURN_IF_ERROR(CopyPartOut(pages, part, name, ttl, &copy));
    v1::CopiedPart& copied = *state.add_parts();
    copied.set_rank(part.rank);
    copied.set_first_kv_head(part.heads.first);
    copied.set_num_kv_heads(part.heads.count);
    copied.set_num_positions(part.num_positions);
  }
  const std::string bytes = state.SerializeAsString();
  copy.set_state_bytes(static_cast<int64_t>(bytes.size()));
  copy.set_state_crc32c(Crc32c(std::as_bytes(std::span<const char>(bytes))));
  copy.set_bytes(copy.bytes() + copy.state_bytes());
  HW_RETURN_IF_ERROR(copies_.PutState(name, bytes, ttl));
  const auto after = sequences_.Export(id, /*with_state=*/false);
  if (after.has_value() && after->finished && after->incarnation == copy.incarnation() &&
      after->num_tokens == copy.num_tokens()) {
    return copy;
  }
  return absl::AbortedError(absl::StrCat("sequence ", id, " goes on while it is copied"));
}

absl::Status SequenceCopier::Open(const Pages& pages, const v1::SequenceCopyState& state) {
  const v1::SequenceState& sequence = state.sequence();
  SequenceSpec spec = {.sequence = pages.id,
                       .fingerprint = pages.fingerprint,
                       .geometry = pages.geometry,
                       .num_ranks = sequence.num_ranks(),
                       .max_tokens = sequence.request().max_tokens(),
                       .tenant = sequence.request().tenant(),
                       .dtype = PageDtypeOf(sequence.request().fingerprint().dtype())};
  for (const v1::CopiedPart& part : state.parts()) {
    HW_RETURN_IF_ERROR(CheckPart(part, spec.num_ranks, spec.geometry, spec.max_tokens));
    // Room for all of it, at once.
    spec.prompt_tokens = std::max(spec.prompt_tokens, part.num_positions());
  }
  absl::Status opened = store_.Open(spec);
  for (int tries = 0; absl::IsResourceExhausted(opened) && tries < kRoomTries; ++tries) {
    HW_RETURN_IF_ERROR(sequences_.MakeRoom(opened));
    opened = store_.Open(spec);
  }
  return opened;
}

// In calls of a size that the store takes.
absl::Status SequenceCopier::Reserve(const Pages& pages, const WrittenPart& part) {
  const int64_t row = int64_t{pages.geometry.num_layers} * part.heads.count;
  const int64_t most = std::max<int64_t>(1, kMaxPagesPerReservation / row);
  const int64_t num_pages = pages.geometry.PagesFor(part.num_positions);
  for (int64_t first = 0; first < num_pages; first += most) {
    const auto reserved = store_.Reserve({.sequence = pages.id,
                                          .rank = part.rank,
                                          .heads = part.heads,
                                          .first_page = first,
                                          .num_pages = std::min(most, num_pages - first)},
                                         /*direct=*/false);
    HW_RETURN_IF_ERROR(reserved.status());
  }
  return absl::OkStatus();
}

absl::Status SequenceCopier::CopyPartIn(const Pages& pages, const WrittenPart& part,
                                        const std::string& name) {
  if (part.num_positions == 0) return absl::OkStatus();
  HW_RETURN_IF_ERROR(Reserve(pages, part));
  const auto page_bytes = static_cast<size_t>(pages.geometry.page_bytes());
  const size_t batch = std::max<size_t>(1, kBatchBytes / page_bytes);
  std::vector<std::byte> memory(batch * page_bytes);
  std::vector<PageKey> keys;
  const auto fetch = [&]() -> absl::Status {
    const std::span<std::byte> bytes = std::span(memory).first(keys.size() * page_bytes);
    HW_RETURN_IF_ERROR(copies_.GetPages(name, keys, bytes));
    for (size_t i = 0; i < keys.size(); ++i) {
      const RowRange rows = pages.RowsOf(keys[i], part);
      const auto used = static_cast<size_t>(rows.num_positions * pages.geometry.row_bytes);
      HW_RETURN_IF_ERROR(store_.Write(part.rank, rows, bytes.subspan(i * page_bytes, used)));
    }
    keys.clear();
    return absl::OkStatus();
  };
  HW_RETURN_IF_ERROR(pages.ForEach(part, [&](const PageKey& key) {
    keys.push_back(key);
    return keys.size() == batch ? fetch() : absl::OkStatus();
  }));
  if (!keys.empty()) HW_RETURN_IF_ERROR(fetch());
  return store_.Commit(pages.id, part.rank, part.num_positions);
}

absl::StatusOr<v1::SequenceState> SequenceCopier::CopyIn(SequenceId id,
                                                         const v1::CopyRecord& copy) {
  HW_ASSIGN_OR_RETURN(const std::string bytes,
                      copies_.GetState(copy.id(), copy.state_bytes(), copy.state_crc32c()));
  v1::SequenceCopyState state;
  if (!state.ParseFromString(bytes)) {
    return absl::DataLossError(absl::StrCat("the state in copy ", copy.id(), " is damaged"));
  }
  HW_ASSIGN_OR_RETURN(const Pages pages, Pages::Of(id, state.sequence()));
  HW_RETURN_IF_ERROR(Open(pages, state));
  absl::Status copied;
  for (const v1::CopiedPart& part : state.parts()) {
    copied.Update(CopyPartIn(pages,
                             {.rank = part.rank(),
                              .heads = {part.first_kv_head(), part.num_kv_heads()},
                              .num_positions = part.num_positions()},
                             copy.id()));
  }
  // Nobody writes to it.
  for (int rank = 0; rank < state.sequence().num_ranks(); ++rank) store_.StopWriter(id, rank);
  if (copied.ok()) return state.sequence();
  TakeOut(id);
  return copied;
}

}  // namespace heavywater
