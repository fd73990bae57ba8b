// One client's text and what is known of the sequence that holds it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/policy/policy.h"

namespace heavywater {

// As the ranks had it when they reported a state.
struct TalkState {
  int64_t tokens_seen = 0;
  uint64_t text_hash = 0;  // of those tokens
  std::unique_ptr<PlainSequence> plain;
};

struct Talk {
  enum class Where {
    kRunning,  // on the ranks
    kCutOff,   // its ranks have lost it; its client comes back
    kEnded,    // its Generate has ended
    kGone,     // nobody will ask for it again
  };

  int number = 0;
  int branch = 0;  // how often it went on otherwise
  SequenceOptions options;
  Budget budget;
  std::vector<int32_t> text;  // all that its client has, prompt included
  Where where = Where::kRunning;
  bool turn = false;  // cut off in a further turn, not in its first

  SequenceId id = 0;
  absl::Duration lease = absl::ZeroDuration();
  int64_t tokens_seen = 0;  // by the ranks
  // Nothing was given up, nobody has damaged anything: its state is never lost.
  bool whole = true;
  bool computed_anew = false;
  // The reference, where it has not parted from the ranks at a tie.
  std::unique_ptr<PlainSequence> plain;
  bool fresh = false;  // the ranks have what attention returned for the last tokens

  std::map<int64_t, TalkState> states;       // by plan, of those reported with a snapshot
  std::map<int64_t, uint64_t> sets_of_plan;  // by plan, of those reported with sets
  std::map<int64_t, uint64_t> digests;       // by tokens seen: sets, scores and attention
  // Bytes of K and V in pages, [layer][kv_head] of the model, rows one after another.
  std::vector<std::vector<std::byte>> rows;

  int32_t TokenAt(int64_t position) const;
  uint64_t TextHash(int64_t tokens) const;
  // Forgets what lay behind the first tokens.
  void CutText(int64_t tokens);
  void ForgetPlansAfter(int64_t plan);
  void ForgetStates();
};

// FNV-1a.
class Digest {
 public:
  void Add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace heavywater
