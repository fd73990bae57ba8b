#include "cache_service/registry/set_messages.h"

#include <algorithm>

namespace heavywater {
namespace {

// A position takes at most 5 bytes and its score 8; a bound of a range 5, in two
// lists: together 920,000 bytes.
constexpr int kMaxPositions = 40'000;
constexpr int kMaxBounds = 40'000;

// Moves on through one list; at most `room` values, which it reduces.
template <typename Value>
class Cursor {
 public:
  using List = google::protobuf::RepeatedField<Value>;
  explicit Cursor(const List& list) : list_(list) {}

  void Take(int& room, List* to) {
    const int count = std::min(room, list_.size() - next_);
    to->Add(list_.begin() + next_, list_.begin() + next_ + count);
    next_ += count;
    room -= count;
  }
  bool done() const { return next_ == list_.size(); }

 private:
  const List& list_;
  int next_ = 0;
};

void CopyHead(const v1::SequenceSet& from, v1::SequenceSet* to) {
  to->set_layer(from.layer());
  to->set_kv_head(from.kv_head());
  to->set_plan(from.plan());
  to->set_tokens_seen(from.tokens_seen());
  to->set_plan_hash(from.plan_hash());
}

}  // namespace

void AppendMessages(const v1::SequenceSet& set, std::vector<v1::SequenceSet>* messages) {
  Cursor<int64_t> sinks(set.sinks());
  Cursor<int64_t> heavy(set.heavy());
  Cursor<int64_t> recent(set.recent());
  Cursor<int64_t> demoted(set.demoted_ranges());
  Cursor<int64_t> dropped(set.dropped_ranges());
  Cursor<double> scores(set.scores());
  bool continued = false;
  do {
    v1::SequenceSet& message = messages->emplace_back();
    CopyHead(set, &message);
    message.set_continued(continued);
    continued = true;
    int room = kMaxPositions;
    sinks.Take(room, message.mutable_sinks());
    heavy.Take(room, message.mutable_heavy());
    recent.Take(room, message.mutable_recent());
    int taken = kMaxPositions - room;  // scores come in the order of these
    scores.Take(taken, message.mutable_scores());
    int demoted_room = kMaxBounds;
    demoted.Take(demoted_room, message.mutable_demoted_ranges());
    int dropped_room = kMaxBounds;
    dropped.Take(dropped_room, message.mutable_dropped_ranges());
  } while (!sinks.done() || !heavy.done() || !recent.done() || !demoted.done() || !dropped.done());
}

}  // namespace heavywater
