#include "worker/comm/gloo/gloo_collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int64_t kHeaderBytes = sizeof(CallHeader);
constexpr int64_t kMaxPayloadBytes = GlooMesh::kMaxMessageBytes - kHeaderBytes;

// memcpy: the standard's copies of std::byte go byte by byte here.
void CopyTo(std::span<std::byte> to, std::span<const std::byte> from) {
  HW_CHECK(from.size() <= to.size());
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

CallHeader ReadHeader(std::span<const std::byte> message) {
  CallHeader header;
  std::memcpy(&header, message.data(), kHeaderBytes);
  return header;
}

// The part of `data` that message number `index` carries.
template <typename T>
std::span<T> Chunk(std::span<T> data, int64_t index) {
  const int64_t chunk = kMaxPayloadBytes / sizeof(T);
  const int64_t total = data.size();
  const int64_t begin = std::min(index * chunk, total);
  return data.subspan(begin, std::min(chunk, total - begin));
}

int64_t NumChunks(int64_t bytes) { return (bytes + kMaxPayloadBytes - 1) / kMaxPayloadBytes; }

}  // namespace

GlooCollectives::GlooCollectives(std::unique_ptr<GlooMesh> mesh, absl::Duration timeout)
    : mesh_(std::move(mesh)), timeout_(timeout), calls_(mesh_->size()) {}

std::vector<bool> GlooCollectives::AllPeers() const {
  std::vector<bool> peers(mesh_->size(), true);
  peers[mesh_->rank()] = false;
  return peers;
}

absl::Status GlooCollectives::MeetWith(const CallHeader& call, const PayloadFor& payload,
                                       absl::Time deadline) {
  calls_[mesh_->rank()] = call;
  HW_RETURN_IF_ERROR(SendToAll(payload));
  std::vector<bool> awaited = AllPeers();
  // All headers first, even when one differs already: every rank must see them
  // all to come to the same verdict, and nobody may close before.
  for (int received = 1; received < mesh_->size(); ++received) {
    absl::StatusOr<int> peer = mesh_->Receive(awaited, deadline);
    if (!peer.ok()) return peer.status();
    awaited[*peer] = false;
    calls_[*peer] = ReadHeader(mesh_->incoming(*peer));
    if (calls_[*peer].op == CallOp::kLeave && call.op != CallOp::kLeave) break;
  }
  HW_RETURN_IF_ERROR(CheckCalls(calls_));
  // A rank that said its part and then gave up must not count as taking part.
  return mesh_->CheckOpen();
}

absl::Status GlooCollectives::SendToAll(const PayloadFor& payload) {
  for (int peer = 0; peer < mesh_->size(); ++peer) {
    if (peer != mesh_->rank()) HW_RETURN_IF_ERROR(Send(peer, payload(peer)));
  }
  return absl::OkStatus();
}

absl::Status GlooCollectives::Send(int peer, std::span<const std::byte> payload) {
  const std::span<std::byte> message = mesh_->outgoing();
  std::memcpy(message.data(), &calls_[mesh_->rank()], kHeaderBytes);
  CopyTo(message.subspan(kHeaderBytes), payload);
  return mesh_->Send(peer, kHeaderBytes + static_cast<int64_t>(payload.size()));
}

absl::Status GlooCollectives::ReceiveFromAll(absl::Time deadline) {
  std::vector<bool> awaited = AllPeers();
  for (int received = 1; received < mesh_->size(); ++received) {
    HW_ASSIGN_OR_RETURN(const int peer, ReceiveFromAny(awaited, deadline));
    awaited[peer] = false;
  }
  return absl::OkStatus();
}

absl::StatusOr<int> GlooCollectives::ReceiveFromAny(const std::vector<bool>& awaited,
                                                    absl::Time deadline) {
  HW_ASSIGN_OR_RETURN(const int peer, mesh_->Receive(awaited, deadline));
  const CallHeader header = ReadHeader(mesh_->incoming(peer));
  if (std::memcmp(&header, &calls_[peer], kHeaderBytes) == 0) return peer;
  return absl::InternalError(absl::StrCat(
      "rank ", peer, " sent data of ", DescribeCall(header), " (call ", header.sequence,
      ") within ", DescribeCall(calls_[peer]), " (call ", calls_[peer].sequence, ")"));
}

std::span<const std::byte> GlooCollectives::Payload(int peer, int64_t bytes) const {
  return mesh_->incoming(peer).subspan(kHeaderBytes, bytes);
}

std::span<std::byte> GlooCollectives::Staging(int64_t bytes) {
  if (static_cast<int64_t>(staging_.size()) < bytes) staging_.resize(bytes);
  return std::span(staging_).first(bytes);
}

absl::Status GlooCollectives::Meet(const CallHeader& call, absl::Duration timeout) {
  return MeetWith(
      call, [](int) { return std::span<const std::byte>(); }, absl::Now() + timeout);
}

absl::Status GlooCollectives::AllGather(const CallHeader& call, std::span<const float> in,
                                        std::span<float> out) {
  HW_CHECK(out.size() == in.size() * mesh_->size());
  const absl::Time deadline = absl::Now() + timeout_;
  const std::span<const std::byte> mine = std::as_bytes(in);
  const std::span<std::byte> all = Staging(out.size_bytes());
  const int64_t num_chunks = std::max<int64_t>(NumChunks(mine.size()), 1);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const auto payload = [&](int) { return Chunk(mine, chunk); };
    if (chunk == 0) {
      HW_RETURN_IF_ERROR(MeetWith(call, payload, deadline));
    } else {
      HW_RETURN_IF_ERROR(SendToAll(payload));
      HW_RETURN_IF_ERROR(ReceiveFromAll(deadline));
    }
    for (int rank = 0; rank < mesh_->size(); ++rank) {
      const auto part = Chunk(all.subspan(rank * mine.size(), mine.size()), chunk);
      CopyTo(part, rank == mesh_->rank() ? Chunk(mine, chunk) : Payload(rank, part.size()));
    }
  }
  CopyTo(std::as_writable_bytes(out), all);
  return absl::OkStatus();
}

absl::Status GlooCollectives::Broadcast(const CallHeader& call, std::vector<std::byte>& data,
                                        absl::Duration timeout) {
  const std::span<const std::byte> none;
  const bool is_root = mesh_->rank() == call.root;
  const auto payload = [&](int) {
    return is_root ? Chunk(std::span<const std::byte>(data), 0) : none;
  };
  HW_RETURN_IF_ERROR(MeetWith(call, payload, absl::Now() + timeout));
  if (is_root) return SendRest(data);
  std::vector<std::byte> received(calls_[call.root].length);
  const std::span<std::byte> first = Chunk(std::span(received), 0);
  CopyTo(first, Payload(call.root, first.size()));
  HW_RETURN_IF_ERROR(ReceiveRest(call.root, received, absl::Now() + timeout_));
  data = std::move(received);
  return absl::OkStatus();
}

absl::Status GlooCollectives::SendRest(std::span<const std::byte> data) {
  for (int64_t chunk = 1; chunk < NumChunks(data.size()); ++chunk) {
    HW_RETURN_IF_ERROR(SendToAll([&](int) { return Chunk(data, chunk); }));
  }
  return absl::OkStatus();
}

absl::Status GlooCollectives::ReceiveRest(int root, std::span<std::byte> data,
                                          absl::Time deadline) {
  std::vector<bool> awaited(mesh_->size(), false);
  awaited[root] = true;
  for (int64_t chunk = 1; chunk < NumChunks(data.size()); ++chunk) {
    HW_RETURN_IF_ERROR(ReceiveFromAny(awaited, deadline).status());
    const std::span<std::byte> part = Chunk(data, chunk);
    CopyTo(part, Payload(root, part.size()));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
