// Which host pages of a sequence rest on one rank, which should, and which of those that
// rest are wanted back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_service/tier/host_tier.h"

namespace heavywater {

// KV heads are counted over the rank. Used by one thread; but a step's queries add to
// missed() from others.
class RestingPages {
 public:
  RestingPages(int num_layers, int num_heads) : num_heads_(num_heads), layers_(num_layers) {}

  void Grow(int64_t num_pages);
  int64_t num_resting() const { return num_resting_; }
  bool Rests(int layer, int head, int64_t page) const {
    return page < num_pages_ && layers_[layer].state[Index(head, page)] != State::kPresent;
  }

  // Whether it has a copy that can come back.
  bool MayReturn(int layer, int head, int64_t page) const {
    return page < num_pages_ && layers_[layer].resting[Index(head, page)] != 0;
  }

  // For RecallView, [num_heads][num_pages].
  std::span<const uint8_t> resting(int layer) const { return layers_[layer].resting; }
  std::span<int64_t> missed(int layer) { return layers_[layer].missed; }

  // What positions of a page have received, 2^-32 fixed point; older mass is halved first.
  void HalveHeat();
  void AddHeat(int layer, int head, int64_t page, int64_t mass) {
    layers_[layer].heat[Index(head, page)] += mass;
  }

  // Up to `max` pages below `end_page`, coldest first; ties to the lower page, layer, head.
  // Not those that came back within the last rounds.
  void BeginRound() { ++round_; }
  std::vector<PageId> Coldest(int64_t end_page, int64_t max, int spared_layer = -1) const;
  void Rest(const PageId& page);

  // Asked for from now on, if it rests and was not yet.
  bool Ask(const PageId& page);
  // Pages that have missed so much that they are wanted back: asked for from now on.
  std::vector<PageId> TakeWanted();
  const std::vector<PageId>& asked() const { return asked_; }
  // An asked page has come back; or never will.
  void Return(const PageId& page);
  void Lose(const PageId& page);

 private:
  enum class State : uint8_t { kPresent, kRests, kAsked, kGone };
  struct Layer {
    std::vector<State> state;
    std::vector<uint8_t> resting;  // 1: kRests or kAsked
    std::vector<int64_t> missed;
    std::vector<int64_t> heat;
    std::vector<int64_t> returned;  // the round in which it came back
  };
  int64_t Index(int head, int64_t page) const { return head * num_pages_ + page; }

  const int num_heads_;
  int64_t num_pages_ = 0;
  int64_t num_resting_ = 0;
  int64_t round_ = 0;
  std::vector<Layer> layers_;  // each [num_heads][num_pages]
  std::vector<PageId> asked_;
};

}  // namespace heavywater
