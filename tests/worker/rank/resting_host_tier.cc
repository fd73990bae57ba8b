#include "tests/worker/rank/resting_host_tier.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace heavywater {

std::byte* RestingHostTier::Page(SequenceId sequence, int layer, int kv_head, int64_t page) {
  const Key key = {sequence, {layer, kv_head, page}};
  if (below_.contains(key)) return nullptr;
  const auto returned = returned_.find(key);
  if (returned != returned_.end()) return returned->second.data();
  return local_.Page(sequence, layer, kv_head, page);
}

void RestingHostTier::Rest(SequenceId sequence, std::span<const PageId> pages) {
  for (const PageId& page : pages) {
    EXPECT_LE((page.page + 1) * 16, local_.watermark(sequence)) << "16: the least of a page";
    std::byte* const memory = Page(sequence, page.layer, page.kv_head, page.page);
    ASSERT_NE(memory, nullptr) << "page " << page.page << " rests already";
    const Key key = {sequence, page};
    below_[key].assign(memory, memory + page_bytes_);
    std::fill_n(memory, page_bytes_, std::byte{0xff});  // NaN in every dtype
    if (const auto returned = returned_.find(key); returned != returned_.end()) {
      spoilt_.push_back(std::move(returned->second));
      returned_.erase(returned);
    }
    bytes_to_rest -= page_bytes_;
  }
}

void RestingHostTier::Ask(SequenceId sequence, std::span<const PageId> pages) {
  for (const PageId& page : pages) {
    EXPECT_TRUE(below_.contains({sequence, page}));
    EXPECT_EQ(std::count(asked_.begin(), asked_.end(), Key{sequence, page}), 0);
    ++num_asked;
    if (loses.contains(page.page)) {
      gone_[sequence].push_back(page);
    } else {
      asked_.emplace_back(sequence, page);
    }
  }
}

std::vector<PageId> RestingHostTier::TakeGone(SequenceId sequence) {
  return std::exchange(gone_[sequence], {});
}

void RestingHostTier::Deliver(int64_t max) {
  for (; max > 0 && !asked_.empty(); --max) {
    const Key key = asked_.front();
    asked_.pop_front();
    returned_[key] = std::move(below_.at(key));
    below_.erase(key);
  }
}

}  // namespace heavywater
