#include "worker/rank/resting_pages.h"

#include <algorithm>
#include <tuple>

#include "cache_service/base/check.h"
#include "worker/rank/restrided.h"

namespace heavywater {
namespace {

// Of one query's attention: what a page must have missed, by estimate and since it rests, before
// it is asked for. A clear need is there at once; what weighs a thousandth comes back after
// some tens of steps, so that pages which everybody reads a little do not come and go all the
// time.
constexpr int64_t kAskMass = (int64_t{1} << 32) / 64;
// On their way at a time, of one sequence.
constexpr int64_t kMaxAsked = 256;
// A page that has come back stays for so many rounds at least.
constexpr int64_t kStayRounds = 2;

}  // namespace

void RestingPages::Grow(int64_t num_pages) {
  if (num_pages <= num_pages_) return;
  for (Layer& layer : layers_) {
    layer.state = Restrided(layer.state, num_heads_, num_pages_, num_pages);
    layer.resting = Restrided(layer.resting, num_heads_, num_pages_, num_pages);
    layer.missed = Restrided(layer.missed, num_heads_, num_pages_, num_pages);
    layer.heat = Restrided(layer.heat, num_heads_, num_pages_, num_pages);
    layer.returned = Restrided(layer.returned, num_heads_, num_pages_, num_pages);
  }
  num_pages_ = num_pages;
}

void RestingPages::HalveHeat() {
  for (Layer& layer : layers_) {
    for (int64_t& heat : layer.heat) heat /= 2;
  }
}

std::vector<PageId> RestingPages::Coldest(int64_t end_page, int64_t max, int spared_layer) const {
  struct Candidate {
    int64_t heat;
    PageId page;
  };
  std::vector<Candidate> candidates;
  for (int index = 0; index < static_cast<int>(layers_.size()); ++index) {
    if (index == spared_layer) continue;
    const Layer& layer = layers_[index];
    for (int head = 0; head < num_heads_; ++head) {
      for (int64_t page = 0; page < std::min(end_page, num_pages_); ++page) {
        const int64_t i = Index(head, page);
        if (layer.state[i] != State::kPresent) continue;
        if (layer.returned[i] > 0 && round_ - layer.returned[i] <= kStayRounds) continue;
        candidates.push_back({layer.heat[i], {index, head, page}});
      }
    }
  }
  const auto colder = [](const Candidate& a, const Candidate& b) {
    return std::tie(a.heat, a.page.page, a.page.layer, a.page.kv_head) <
           std::tie(b.heat, b.page.page, b.page.layer, b.page.kv_head);
  };
  const auto count = std::min<size_t>(candidates.size(), static_cast<size_t>(max));
  std::partial_sort(candidates.begin(), candidates.begin() + static_cast<int64_t>(count),
                    candidates.end(), colder);
  std::vector<PageId> pages;
  for (size_t i = 0; i < count; ++i) pages.push_back(candidates[i].page);
  return pages;
}

void RestingPages::Rest(const PageId& page) {
  Layer& layer = layers_[page.layer];
  const int64_t i = Index(page.kv_head, page.page);
  HW_CHECK(layer.state[i] == State::kPresent);
  layer.state[i] = State::kRests;
  layer.resting[i] = 1;
  layer.missed[i] = 0;
  ++num_resting_;
}

bool RestingPages::Ask(const PageId& page) {
  Layer& layer = layers_[page.layer];
  State& state = layer.state[Index(page.kv_head, page.page)];
  if (state != State::kRests) return false;
  state = State::kAsked;
  asked_.push_back(page);
  return true;
}

std::vector<PageId> RestingPages::TakeWanted() {
  std::vector<PageId> wanted;
  if (num_resting_ == static_cast<int64_t>(asked_.size())) return wanted;
  for (int index = 0; index < static_cast<int>(layers_.size()); ++index) {
    Layer& layer = layers_[index];
    for (int64_t i = 0; i < static_cast<int64_t>(layer.state.size()); ++i) {
      if (layer.state[i] != State::kRests || layer.missed[i] < kAskMass) continue;
      if (static_cast<int64_t>(asked_.size()) >= kMaxAsked) return wanted;
      layer.state[i] = State::kAsked;
      wanted.push_back({index, static_cast<int>(i / num_pages_), i % num_pages_});
      asked_.push_back(wanted.back());
    }
  }
  return wanted;
}

void RestingPages::Return(const PageId& page) {
  Layer& layer = layers_[page.layer];
  const int64_t i = Index(page.kv_head, page.page);
  HW_CHECK(layer.state[i] == State::kAsked);
  layer.state[i] = State::kPresent;
  layer.resting[i] = 0;
  layer.heat[i] += layer.missed[i];
  layer.missed[i] = 0;
  layer.returned[i] = std::max<int64_t>(round_, 1);
  --num_resting_;
  std::erase(asked_, page);
}

void RestingPages::Lose(const PageId& page) {
  Layer& layer = layers_[page.layer];
  const int64_t i = Index(page.kv_head, page.page);
  if (layer.state[i] != State::kAsked) return;
  layer.state[i] = State::kGone;
  layer.resting[i] = 0;
  --num_resting_;
  std::erase(asked_, page);
}

}  // namespace heavywater
