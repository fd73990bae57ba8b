// The streams of BlobService.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/executor.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/blob_store.h"
#include "heavywater/v1/blob.grpc.pb.h"

namespace heavywater {

inline constexpr int kMaxBlobKeys = 1024;        // of one request
inline constexpr size_t kMaxBlobKeyBytes = 256;  // a key; a space as well
inline constexpr size_t kMaxBlobChunkBytes = 1 << 20;

// INVALID_ARGUMENT naming the field.
absl::Status CheckBlobSpace(const std::string& space);
absl::Status CheckBlobKeys(const google::protobuf::RepeatedPtrField<std::string>& keys,
                           int min_keys);

class PutBlobsStream;

// The streams of Put that are open: one that stops in the middle of a value holds pages
// that nobody else gets, and is ended after a while. Thread safe.
class PutBlobsStreams {
 public:
  // The clock must outlive it.
  PutBlobsStreams(absl::Duration max_stall, Clock& clock) : max_stall_(max_stall), clock_(clock) {}

  void Add(PutBlobsStream* stream);
  void Remove(PutBlobsStream* stream);
  void Tick();
  absl::Time Now() { return clock_.Now(); }

 private:
  const absl::Duration max_stall_;
  Clock& clock_;
  Mutex mutex_;  // taken before a stream's
  std::set<PutBlobsStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

// Takes chunk after chunk, value after value; the first error ends the stream, and what
// was not whole goes. Deletes itself.
class PutBlobsStream final : public grpc::ServerReadReactor<v1::PutBlobsRequest> {
 public:
  // What is taken once the server drains or from a wrong request is `refused`.
  PutBlobsStream(BlobStore& blobs, PutBlobsStreams& all, const absl::Status& refused,
                 v1::PutBlobsResponse* response);

  void OnReadDone(bool ok) override;
  void OnDone() override;
  // DEADLINE_EXCEEDED, where it has waited since before `before` for more of a value.
  void EndIfStalled(absl::Time before);

 private:
  absl::Status TakeChunk();
  absl::Status BeginBlob();
  absl::Status EndStream();
  // Whether nobody has ended it yet; from now on somebody has.
  bool BeginEnd();

  BlobStore& blobs_;
  PutBlobsStreams& all_;
  v1::PutBlobsResponse* const response_;
  v1::PutBlobsRequest chunk_;
  // Of whoever takes a chunk, or ends a stream that waits for one.
  std::unique_ptr<BlobStore::Writer> writer_;  // null: the value is passed over
  int64_t missing_bytes_ = 0;                  // of the value, still to come
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time waits_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // not: it takes one
};

// Sends each chunk when the one before has been taken, so that a slow reader holds one
// chunk of memory and no page. Deletes itself.
class GetBlobsStream final : public grpc::ServerWriteReactor<v1::GetBlobsResponse> {
 public:
  // The threads: as BlobService has them.
  GetBlobsStream(BlobStore& blobs, const std::vector<Executor*>& tier_threads,
                 const v1::GetBlobsRequest& request);

  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  void SendNext();
  void SendPage();
  void SendMissing();
  BlobKey CurrentKey() const { return {request_.space(), request_.keys(index_)}; }

  BlobStore& blobs_;
  const std::vector<Executor*>& tier_threads_;
  const v1::GetBlobsRequest request_;
  v1::GetBlobsResponse chunk_;
  int index_ = 0;
  BlobStore::Blob blob_ = {};  // of the key at index_
  int64_t page_ = 0;           // to be sent next; 0: blob_ is not known yet
};

}  // namespace heavywater
