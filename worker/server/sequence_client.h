// Sequences as the cache service knows them: rank 0 opens each of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"
#include "worker/policy/policy.h"
#include "worker/rank/sequence_options.h"
#include "worker/server/cache_link.h"

namespace heavywater {

struct OpenedSequence {
  SequenceId id = 0;
  absl::Duration lease = absl::InfiniteDuration();  // at the cache service, if there is one
  // Of one that was reopened: the committed state that it goes on from.
  int64_t plan = 0;
  int64_t tokens_seen = 0;
  int32_t incarnation = 0;
  int64_t known_tokens = 0;   // of its text: so many it has seen before
  bool was_finished = false;  // before that: no rank wrote to it any more
  // Of one that was opened: its prompt's first tokens, in stored pages.
  int64_t prefix_tokens = 0;

  bool restored() const { return plan > 0; }
};

// The prompt, and how much of it may come from stored pages. Empty: none may, and it offers none.
struct PrefixToOpen {
  std::span<const int32_t> tokens = {};
  int64_t max_tokens = 0;
};

struct SequenceToOpen {
  const SequenceOptions& options;
  const Budget& budget;  // what its policy resolves to
  const std::string& tenant;
  PrefixToOpen prefix = {};
};

// Thread safe.
class SequenceClient {
 public:
  // `link` null: no cache service, ids count from 1. It must outlive this.
  explicit SequenceClient(CacheLink* link);

  bool has_service() const { return link_ != nullptr; }
  // Registers the sequence; its lease is renewed until Release(). UNAVAILABLE
  // when the service cannot be reached or the group is joining it anew.
  absl::StatusOr<OpenedSequence> Open(const SequenceToOpen& sequence);
  // What is known of a sequence, with the number of its tokens, not themselves.
  // UNAVAILABLE likewise; NOT_FOUND; without a cache service FAILED_PRECONDITION.
  absl::StatusOr<v1::Sequence> Get(SequenceId id);
  // A sequence goes on from the newest state that has seen at most `max_tokens_seen`;
  // `text`: its tokens so far; `extends`: as ReopenSequenceRequest says. UNAVAILABLE
  // likewise; else as SequenceService::Reopen says, without a cache service
  // FAILED_PRECONDITION.
  absl::StatusOr<OpenedSequence> Reopen(SequenceId id, const SequenceToOpen& sequence,
                                        const std::vector<int32_t>& text, int64_t max_tokens_seen,
                                        bool extends);
  // Ends a sequence that Reopen() has found to be lost (DATA_LOSS).
  void Close(SequenceId sequence);
  // A sequence that was reopened and that no rank has touched since is as it was before: no
  // rank writes to it, and it is suspended for `suspended`, where that is not zero. As far as
  // the service can be reached; its lease ends it otherwise.
  void GiveBack(const OpenedSequence& opened, absl::Duration suspended);
  // The lease runs out by itself. `discard`: nothing of it is worth keeping, it
  // ends now.
  void Release(SequenceId sequence, bool discard);

 private:
  absl::Status ReportUntouched(const OpenedSequence& opened, int rank);
  absl::StatusOr<OpenedSequence> OpenOnce(const SequenceToOpen& sequence, int64_t prompt_tokens);

  CacheLink* const link_;
  const Epoch opened_epoch_;  // when this was made
  const std::unique_ptr<v1::SequenceService::Stub> stub_;
  const std::unique_ptr<v1::GroupService::Stub> group_stub_;
  std::atomic<uint64_t> counter_ = 0;
};

}  // namespace heavywater
