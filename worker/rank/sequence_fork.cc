// A sequence that goes on twice, and one that goes back: copies of the whole state between
// two steps, gains since the last plan included, which no snapshot has.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

DeviceSpan<std::byte> Bytes(const DeviceBuffer& buffer) { return buffer.As<std::byte>(); }

}  // namespace

absl::Status HostPages::CopyFrom(const HostPages& from, int64_t tokens) {
  if (role_ != Role::kWriter) return absl::OkStatus();
  if (!from.readable()) {
    return absl::DataLossError(
        absl::StrCat("host pages of sequence ", from.sequence_, " cannot be read"));
  }
  for (int64_t page = 0; page < geometry_.PagesFor(tokens); ++page) {
    if (!from.backed_[page]) {
      tier_->Skip(sequence_, page, 1);
      backed_[page] = false;
      continue;
    }
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      for (int head = 0; head < heads_.count; ++head) {
        std::byte* to = tier_->Page(sequence_, layer, heads_.first + head, page);
        const std::byte* source = from.Page(layer, head, page);
        if (to == nullptr || source == nullptr) {
          return absl::DataLossError(absl::StrCat("page ", page, " of layer ", layer,
                                                  " of sequence ", from.sequence_,
                                                  " is not there"));
        }
        std::memcpy(to, source, static_cast<size_t>(geometry_.page_bytes()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceRecall::CopyFrom(const SequenceRecall& from) {
  Backend& backend = memory_.backend();
  HW_RETURN_IF_ERROR(backend.CopyOnDevice(Bytes(channels_), Bytes(from.channels_), stream_));
  if (from.squares_.bytes() == 0) {
    squares_ = DeviceBuffer();
  } else {
    HW_RETURN_IF_ERROR(backend.CopyOnDevice(Bytes(squares_), Bytes(from.squares_), stream_));
  }
  HW_RETURN_IF_ERROR(AddPages(from.num_pages() * sketch_.page_tokens));
  for (size_t page = 0; page < sketches_.size(); ++page) {
    HW_RETURN_IF_ERROR(
        backend.CopyOnDevice(Bytes(sketches_[page]), Bytes(from.sketches_[page]), stream_));
  }
  for (int layer = 0; layer < rank_.shape.num_layers && sketches_.size() > 0; ++layer) {
    layers_[layer].demoted = from.layers_[layer].demoted;
    layers_[layer].ledger = from.layers_[layer].ledger;
    layers_[layer].changed = true;
    HW_RETURN_IF_ERROR(Upload(layer));
  }
  sketched_tokens_ = from.sketched_tokens_;
  clock_ = from.clock_;
  steps_ = from.steps_;
  stats_ = from.stats_;
  return absl::OkStatus();
}

absl::Status SequenceCache::CopyFrom(const SequenceCache& from) {
  HW_RETURN_IF_ERROR(BeginPrompt());
  HW_RETURN_IF_ERROR(from.broken_);
  // An append that needed more slots until the next plan has reserved more, too.
  if (from.reservation_.bytes() > reservation_.bytes()) {
    HW_RETURN_IF_ERROR(reservation_.Extend(from.reservation_.bytes(),
                                           absl::StrCat("a copy of sequence ", from.id_)));
  }
  sizes_ = from.sizes_;
  for (const LayerStorage& block : from.storage_) {
    HW_ASSIGN_OR_RETURN(LayerStorage copy,
                        LayerStorage::CopyOf(blocks_.shape, block, memory_, stream_));
    storage_.push_back(std::move(copy));
  }
  HW_RETURN_IF_ERROR(host_pages_.CopyFrom(from.host_pages_, from.tokens_seen_));
  if (recall_ != nullptr) HW_RETURN_IF_ERROR(recall_->CopyFrom(*from.recall_));
  if (history_ != nullptr) history_ = std::make_unique<PivotalHistory>(*from.history_);
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  prompt_done_ = true;
  tokens_seen_ = from.tokens_seen_;
  queries_since_plan_ = from.queries_since_plan_;
  plans_ = from.plans_;
  hash_ = from.hash_;
  host_pages_.Publish(tokens_seen_);
  reservation_.Resize(std::max(from.reservation_.bytes(), planned_bytes()));
  NoteBytes(0);
  return absl::OkStatus();
}

absl::Status SequenceCache::Truncate(int64_t tokens) {
  HW_RETURN_IF_ERROR(broken_);
  if (!prompt_done_) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  if (tokens < 1 || tokens > tokens_seen_) {
    return absl::OutOfRangeError(
        absl::StrCat("tokens is ", tokens, ", want 1 to ", tokens_seen_, ", the tokens seen"));
  }
  if (budget_.bounded_decode || budget_.uses_scores || recall_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "policy ", std::string(PolicyName(options_.policy.policy)),
        " forgets, and later tokens are in what it remembers: want full, or a copy from before"));
  }
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    for (int set = 0; set < blocks_.sets.own_sets; ++set) {
      std::vector<int32_t> later;
      const std::span<const Position> positions = table(block, set).positions();
      for (size_t slot = 0; slot < positions.size(); ++slot) {
        const bool goes = positions[slot] != kNoPosition && positions[slot] >= tokens;
        if (goes) later.push_back(static_cast<int32_t>(slot));
      }
      HW_RETURN_IF_ERROR(
          memory_.backend().ReleaseSlots(blocks_.shape, View(block), set, later, stream_));
      for (const int32_t slot : later) {
        RemoveResident(blocks_.LayerOf(block), ModelHead(block, set) + 1, slot, positions[slot],
                       hash_);
      }
      // Nothing was ever freed: positions lie in their order.
      storage_[block].table(set).Undo(later, tokens);
    }
  }
  queries_since_plan_ = std::max<int64_t>(queries_since_plan_ - (tokens_seen_ - tokens), 0);
  tokens_seen_ = tokens;
  return memory_.backend().Synchronize(stream_);
}

absl::Status RankCache::Fork(SequenceId sequence, RankCache& from, SequenceId source) {
  HW_ASSIGN_OR_RETURN(const SequenceCache* original, from.Find(source));
  if (&from.backend_ != &backend_ || !(from.options_.shape == options_.shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", source, " is of another device or shape, want the same"));
  }
  if (!original->prompt_done()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the prompt of sequence ", source, " has not run to its end"));
  }
  HW_RETURN_IF_ERROR(backend_.Synchronize(from.stream_));
  SequenceOptions options = original->options();
  options.restored_tokens = original->tokens_seen();
  HW_RETURN_IF_ERROR(Open(sequence, options));
  const absl::Status copied = sequences_[sequence]->CopyFrom(*original);
  if (!copied.ok()) HW_RETURN_IF_ERROR(Close(sequence));
  return copied;
}

}  // namespace heavywater
