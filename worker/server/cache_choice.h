// Which of several cache services a rank is with, and when it looks for another.
#pragma once

#include <vector>

#include "absl/time/time.h"

namespace heavywater {

// The ranks of a group have the same services in the same order, and no other way to agree:
// each stays where its group has formed for as long as it may, looks at the others for a
// moment only, and moves where home says nothing. So they meet: at home while that answers,
// else at the first of the others that does. Not thread safe.
class CacheChoice {
 public:
  // `count` services, 1 or more; the first one is home. `patience`: how long home may be silent, or
  // a group wait there for its ranks, before the others are looked at.
  CacheChoice(int count, absl::Duration patience) : count_(count), patience_(patience) {}

  int home() const { return home_; }
  // Home has answered a call, or has not.
  void NoteHome(bool answered, absl::Time now);
  // It has been silent for longer than it may, and there are others.
  bool HomeIsLost(absl::Time now) const;
  // The ranks of the group are waited for from now on. `first_patience`: until the first look, of a
  // process that has just begun: its group may be elsewhere already.
  void BeginWaiting(absl::Time now, absl::Duration first_patience = absl::InfiniteDuration());
  // How long to wait at home until it is time to look at Others(); infinite where there are none.
  absl::Duration UntilLook(absl::Time now) const;
  // Whether it is time to look at Others().
  bool LooksElsewhere(absl::Time now) const;
  // All but home, in the order in which they are tried: those after home where that is lost, so
  // that all ranks take the same one, else from where the last look ended.
  std::vector<int> Others(absl::Time now) const;
  // They have been looked at up to `last`, and the group has not formed: `answered` is the first
  // that answered, or -1. It is home from now on where home itself is lost.
  void NoteLooked(int answered, int last, absl::Time now);
  // The group has formed there.
  void Settle(int service, absl::Time now);

 private:
  const int count_;
  const absl::Duration patience_;
  int home_ = 0;
  int looked_at_ = 0;                                 // last
  absl::Time silent_since_ = absl::InfiniteFuture();  // home answers
  absl::Time look_at_ = absl::InfiniteFuture();       // for the ranks that are waited for
};

}  // namespace heavywater
