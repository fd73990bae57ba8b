#include "worker/server/snapshot_source.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "worker/server/snapshot_proto.h"

namespace heavywater {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(3);  // of one part

}  // namespace

SnapshotSource::SnapshotSource(CacheLink& link) : link_(link) {}

absl::StatusOr<SequenceSnapshot> SnapshotSource::ReadPart(SequenceId sequence, int64_t plan,
                                                          int rank) const {
  v1::ReadSnapshotRequest request;
  request.set_sequence_id(sequence);
  request.set_plan(plan);
  request.set_rank(rank);
  const absl::Time deadline = absl::Now() + kTimeout;
  std::string bytes;
  int64_t total = 0;
  do {
    request.set_offset(static_cast<int64_t>(bytes.size()));
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::ReadSnapshotResponse response;
    const absl::Status status =
        FromGrpcStatus(link_.service()->sequences->ReadSnapshot(&context, request, &response));
    link_.Note(status);
    HW_RETURN_IF_ERROR(status);
    if (response.data().empty()) {
      return absl::DataLossError(absl::StrCat("snapshot of rank ", rank, " ends at ", bytes.size(),
                                              " bytes, want ", response.total_bytes()));
    }
    bytes += response.data();
    total = response.total_bytes();
  } while (static_cast<int64_t>(bytes.size()) < total);
  return ParseSnapshot(bytes);
}

absl::StatusOr<SequenceSnapshot> SnapshotSource::Read(SequenceId sequence, int64_t plan) const {
  HW_ASSIGN_OR_RETURN(SequenceSnapshot own, ReadPart(sequence, plan, link_.options().rank));
  if (!own.slots.empty()) return own;
  HW_ASSIGN_OR_RETURN(const SequenceSnapshot shared, ReadPart(sequence, plan, /*rank=*/0));
  return JoinSnapshots(std::move(own), shared);
}

}  // namespace heavywater
