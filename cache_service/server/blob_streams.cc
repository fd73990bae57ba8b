#include "cache_service/server/blob_streams.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/validate.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/server/run_in_tier.h"

namespace heavywater {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

}  // namespace

absl::Status CheckBlobSpace(const std::string& space) {
  return CheckText("space", space, 1, kMaxBlobKeyBytes);
}

absl::Status CheckBlobKeys(const google::protobuf::RepeatedPtrField<std::string>& keys,
                           int min_keys) {
  HW_RETURN_IF_ERROR(CheckInt("keys", keys.size(), min_keys, kMaxBlobKeys));
  for (const std::string& key : keys) {
    HW_RETURN_IF_ERROR(CheckText("key", key, 1, kMaxBlobKeyBytes));
  }
  return absl::OkStatus();
}

void PutBlobsStreams::Add(PutBlobsStream* stream) {
  MutexLock lock(&mutex_);
  streams_.insert(stream);
}

void PutBlobsStreams::Remove(PutBlobsStream* stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void PutBlobsStreams::Tick() {
  const absl::Time before = clock_.Now() - max_stall_;
  MutexLock lock(&mutex_);
  for (PutBlobsStream* const stream : streams_) stream->EndIfStalled(before);
}

PutBlobsStream::PutBlobsStream(BlobStore& blobs, PutBlobsStreams& all, const absl::Status& refused,
                               v1::PutBlobsResponse* response)
    : blobs_(blobs), all_(all), response_(response) {
  all_.Add(this);
  if (refused.ok()) {
    StartRead(&chunk_);
  } else {
    Finish(ToGrpcStatus(refused));
  }
}

void PutBlobsStream::OnDone() {
  all_.Remove(this);
  delete this;
}

bool PutBlobsStream::BeginEnd() {
  MutexLock lock(&mutex_);
  return !std::exchange(ended_, true);
}

void PutBlobsStream::OnReadDone(bool ok) {
  {
    MutexLock lock(&mutex_);
    if (ended_) return;
    waits_since_ = absl::InfiniteFuture();
  }
  const absl::Status status = ok ? TakeChunk() : EndStream();
  if (ok && status.ok()) {
    // Under the mutex, so that nobody ends the stream before this read is begun; what it
    // brings is told on another thread.
    MutexLock lock(&mutex_);
    if (missing_bytes_ > 0) waits_since_ = all_.Now();
    StartRead(&chunk_);
    return;
  }
  writer_.reset();  // what is not whole goes before the caller hears of it
  if (BeginEnd()) Finish(ToGrpcStatus(status));
}

void PutBlobsStream::EndIfStalled(absl::Time before) {
  {
    MutexLock lock(&mutex_);
    if (ended_ || waits_since_ > before) return;
    ended_ = true;
  }
  writer_.reset();
  const absl::Status status =
      absl::DeadlineExceededError(absl::StrCat("data: nothing has come for blob_stall_ms, ",
                                               missing_bytes_, " bytes of the value are missing"));
  LogWarn("value given up", {{"reason", std::string(status.message())}});
  Finish(ToGrpcStatus(status));
}

absl::Status PutBlobsStream::EndStream() {
  if (missing_bytes_ == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("data: the stream ended, ", missing_bytes_, " bytes of its last value missing"));
}

absl::Status PutBlobsStream::TakeChunk() {
  HW_RETURN_IF_ERROR(CheckText("data", chunk_.data(), 1, kMaxBlobChunkBytes));
  const uint32_t crc = Crc32c(Bytes(chunk_.data()));
  if (crc != chunk_.crc32c()) {
    return absl::DataLossError(absl::StrCat("crc32c is ", chunk_.crc32c(), ", the ",
                                            chunk_.data().size(), " bytes of data have ", crc));
  }
  if (missing_bytes_ == 0) {
    HW_RETURN_IF_ERROR(BeginBlob());
  } else if (!chunk_.key().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("key: a value begins, but ", missing_bytes_,
                                                   " bytes of the one before are missing"));
  }
  const auto bytes = static_cast<int64_t>(chunk_.data().size());
  if (bytes > missing_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: ", bytes, " bytes came, ", missing_bytes_, " are missing"));
  }
  missing_bytes_ -= bytes;
  if (writer_ == nullptr) return absl::OkStatus();
  HW_RETURN_IF_ERROR(writer_->Append(Bytes(chunk_.data())));
  if (missing_bytes_ > 0) return absl::OkStatus();
  const absl::Status committed = writer_->Commit();
  writer_.reset();
  return committed;
}

absl::Status PutBlobsStream::BeginBlob() {
  HW_RETURN_IF_ERROR(CheckInt("values", response_->stored_size() + 1, 1, kMaxBlobKeys));
  HW_RETURN_IF_ERROR(CheckBlobSpace(chunk_.space()));
  HW_RETURN_IF_ERROR(CheckText("key", chunk_.key(), 1, kMaxBlobKeyBytes));
  HW_RETURN_IF_ERROR(CheckText("tenant", chunk_.tenant(), 0, kMaxNameBytes));
  auto writer = blobs_.Begin({chunk_.space(), chunk_.key()}, chunk_.total_bytes(), chunk_.tenant());
  if (absl::IsResourceExhausted(writer.status())) {
    if (response_->refused_because().empty()) {
      response_->set_refused_because(std::string(writer.status().message()));
    }
  } else if (!writer.ok() && !absl::IsAlreadyExists(writer.status())) {
    return writer.status();
  }
  response_->add_stored(!absl::IsResourceExhausted(writer.status()));
  writer_ = writer.ok() ? *std::move(writer) : nullptr;
  missing_bytes_ = chunk_.total_bytes();
  return absl::OkStatus();
}

GetBlobsStream::GetBlobsStream(BlobStore& blobs, const std::vector<Executor*>& tier_threads,
                               const v1::GetBlobsRequest& request)
    : blobs_(blobs), tier_threads_(tier_threads), request_(request) {
  absl::Status status = CheckBlobSpace(request.space());
  if (status.ok()) status = CheckBlobKeys(request.keys(), /*min_keys=*/1);
  if (status.ok()) {
    SendNext();
  } else {
    Finish(ToGrpcStatus(status));
  }
}

void GetBlobsStream::OnWriteDone(bool ok) {
  if (!ok) {
    Finish(grpc::Status::CANCELLED);
  } else if (index_ == request_.keys_size()) {
    Finish(grpc::Status::OK);
  } else {
    SendNext();
  }
}

void GetBlobsStream::SendNext() {
  if (page_ == 0) {
    const absl::StatusOr<BlobStore::Blob> found = blobs_.Find(CurrentKey());
    if (!found.ok()) return SendMissing();
    blob_ = *found;
  }
  // The stream lives until Finish(), so that work which waits for a tier finds it.
  const absl::Status started =
      RunInTier(tier_threads_, blobs_.TierOf(blob_, page_), [this] { SendPage(); });
  if (!started.ok()) Finish(ToGrpcStatus(started));
}

void GetBlobsStream::SendPage() {
  chunk_.Clear();
  const absl::Status status = blobs_.ReadPage(blob_, page_, chunk_.mutable_data());
  if (!status.ok()) {
    if (absl::IsDataLoss(status)) {
      LogError("corrupt value", {{"status", status.ToString()}});
    }
    // A tier that is away or busy has its pages still.
    if (absl::IsNotFound(status) || absl::IsDataLoss(status)) {
      blobs_.DropLost(CurrentKey(), blob_);
    }
    return SendMissing();
  }
  chunk_.set_index(index_);
  chunk_.set_total_bytes(blob_.bytes);
  chunk_.set_offset(page_ * blob_.page_bytes);
  chunk_.set_crc32c(Crc32c(Bytes(chunk_.data())));
  if (++page_ == blob_.num_pages()) {
    page_ = 0;
    ++index_;
  }
  StartWrite(&chunk_);
}

void GetBlobsStream::SendMissing() {
  chunk_.Clear();
  chunk_.set_index(index_++);
  chunk_.set_missing(true);
  page_ = 0;
  StartWrite(&chunk_);
}

}  // namespace heavywater
