// A sequence's whole state between any two steps as bytes, for another process: what a
// snapshot has, K and V of the residents, and what has been gained since the last plan.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/state_bytes.h"

namespace heavywater {
namespace {

constexpr int64_t kStateFormat = 0x3153'5748;  // "HWS1"

void Write(const LedgerSnapshot& ledger, StateWriter& out) {
  out.Number(ledger.stride);
  out.Array(std::span<const int64_t>(ledger.scores));
  out.Array(std::span<const int64_t>(ledger.clocks));
  std::vector<int64_t> gains;
  for (const LedgerSnapshot::Gain& one : ledger.unreported) {
    gains.insert(gains.end(), {one.head, one.gain.position, one.gain.gain});
  }
  out.Array(std::span<const int64_t>(gains));
}

absl::Status Read(StateReader& in, LedgerSnapshot& ledger) {
  HW_RETURN_IF_ERROR(in.Number(ledger.stride));
  HW_RETURN_IF_ERROR(in.Array(ledger.scores));
  HW_RETURN_IF_ERROR(in.Array(ledger.clocks));
  std::vector<int64_t> gains;
  HW_RETURN_IF_ERROR(in.Array(gains));
  for (size_t i = 0; i + 2 < gains.size(); i += 3) {
    if (gains[i] != static_cast<int>(gains[i]) ||
        gains[i + 1] != static_cast<Position>(gains[i + 1])) {
      return absl::DataLossError("state: a gain of a head or position that there is not");
    }
    ledger.unreported.push_back(
        {static_cast<int>(gains[i]), {static_cast<Position>(gains[i + 1]), gains[i + 2]}});
  }
  return absl::OkStatus();
}

// Fresh gains of a ledger whose rows may have been shorter or longer: what is beyond the
// shorter is 0.
absl::Status TakeGains(std::span<const int64_t> saved, int heads, DemotedLedger& ledger) {
  const auto stride = static_cast<size_t>(ledger.stride());
  const size_t saved_stride = saved.size() / static_cast<size_t>(heads);
  const std::span<int64_t> gains = ledger.fresh_gains();
  for (size_t i = 0; i < saved_stride * static_cast<size_t>(heads); ++i) {
    const size_t head = i / saved_stride;
    const size_t at = i % saved_stride;
    if (at < stride) {
      gains[head * stride + at] = saved[i];
    } else if (saved[i] != 0) {
      return absl::DataLossError(
          absl::StrCat("state: a fresh gain of position ", at, ", want below ", stride));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::byte> HostPages::ReadPage(int64_t page) const {
  std::vector<std::byte> bytes;
  for (int layer = 0; layer < geometry_.num_layers; ++layer) {
    for (int head = 0; head < heads_.count; ++head) {
      const std::byte* from = Page(layer, head, page);
      if (from == nullptr) return {};
      bytes.insert(bytes.end(), from, from + geometry_.page_bytes());
    }
  }
  return bytes;
}

absl::Status HostPages::FillPages(std::span<const std::span<const std::byte>> pages) {
  const auto page_bytes = static_cast<size_t>(geometry_.page_bytes());
  const size_t want = page_bytes * static_cast<size_t>(geometry_.num_layers * heads_.count);
  for (size_t page = 0; page < pages.size(); ++page) {
    if (pages[page].size() != want) {
      return absl::DataLossError(
          absl::StrCat("state: page ", page, " has ", pages[page].size(), " bytes, want ", want));
    }
    size_t at = 0;
    for (int layer = 0; layer < geometry_.num_layers; ++layer) {
      for (int head = 0; head < heads_.count; ++head, at += page_bytes) {
        std::byte* to =
            tier_->Page(sequence_, layer, heads_.first + head, static_cast<int64_t>(page));
        if (to == nullptr) return absl::DataLossError("state: a page's memory is not there");
        std::copy_n(pages[page].begin() + static_cast<std::ptrdiff_t>(at), page_bytes, to);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceRecall::SaveState(StateWriter& out) const {
  HW_ASSIGN_OR_RETURN(const RecallSnapshot snapshot, Snapshot(/*with_scores=*/true));
  for (const int64_t number :
       {snapshot.sketched_tokens, snapshot.clock, snapshot.steps, snapshot.queries, snapshot.reads,
        snapshot.reads_max, snapshot.promoted}) {
    out.Number(number);
  }
  out.Array(std::span<const std::byte>(snapshot.channels));
  out.Array(std::span<const std::byte>(snapshot.squares));
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    Write(snapshot.ledgers[layer], out);
    out.Array(std::span<const int64_t>(layers_[layer].ledger.fresh_gains()));
  }
  return absl::OkStatus();
}

absl::Status SequenceRecall::LoadState(StateReader& in, std::span<const SlotSnapshot> slots,
                                       int64_t tokens_seen) {
  RecallSnapshot snapshot;
  for (int64_t* number :
       {&snapshot.sketched_tokens, &snapshot.clock, &snapshot.steps, &snapshot.queries,
        &snapshot.reads, &snapshot.reads_max, &snapshot.promoted}) {
    HW_RETURN_IF_ERROR(in.Number(*number));
  }
  HW_RETURN_IF_ERROR(in.Array(snapshot.channels));
  HW_RETURN_IF_ERROR(in.Array(snapshot.squares));
  std::vector<std::vector<int64_t>> fresh(layers_.size());
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    HW_RETURN_IF_ERROR(Read(in, snapshot.ledgers.emplace_back()));
    HW_RETURN_IF_ERROR(in.Array(fresh[layer]));
  }
  HW_RETURN_IF_ERROR(Restore(snapshot, slots, tokens_seen));
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    HW_RETURN_IF_ERROR(TakeGains(fresh[layer], rank_.shape.num_kv_heads, layers_[layer].ledger));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> SequenceCache::SaveState() const {
  HW_RETURN_IF_ERROR(broken_);
  if (!prompt_done_) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  if (history_ != nullptr || blocks_.divided) {
    return absl::FailedPreconditionError(
        absl::StrCat(history_ != nullptr ? "scissorhands' history" : "adaptive head_budgets",
                     " cannot be saved, want another policy"));
  }
  if (recall_ != nullptr && host_pages_.first_unbacked() < tokens_seen_) {
    return absl::FailedPreconditionError("not all of the sequence is in host memory");
  }
  StateWriter out;
  for (const int64_t number : {kStateFormat, tokens_seen_, plans_, queries_since_plan_}) {
    out.Number(number);
  }
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    out.Number(storage_[block].capacity());
    for (int set = 0; set < blocks_.sets.own_sets; ++set) {
      out.Array(table(block, set).positions());
    }
    for (const DeviceSpan<const std::byte> buffer : storage_[block].contents()) {
      HW_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                          ReadDevice(buffer, memory_.backend(), stream_));
      out.Array(std::span<const std::byte>(bytes));
    }
  }
  if (recall_ != nullptr) HW_RETURN_IF_ERROR(recall_->SaveState(out));
  return out.Take();
}

absl::Status SequenceCache::LoadState(std::span<const std::byte> state,
                                      std::span<const std::span<const std::byte>> pages) {
  HW_RETURN_IF_ERROR(BeginPrompt());
  StateReader in(state);
  int64_t format = 0;
  HW_RETURN_IF_ERROR(in.Number("format", kStateFormat, kStateFormat, format));
  const int64_t want = options_.restored_tokens;
  HW_RETURN_IF_ERROR(in.Number("tokens_seen", want, want, tokens_seen_));
  HW_RETURN_IF_ERROR(in.Number(plans_));
  HW_RETURN_IF_ERROR(in.Number("queries_since_plan", 0, tokens_seen_, queries_since_plan_));
  std::vector<SlotSnapshot> slots;
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    HW_RETURN_IF_ERROR(LoadBlock(block, in, slots));
  }
  if (recall_ != nullptr) {
    HW_RETURN_IF_ERROR(host_pages_.FillPages(pages));
    HW_RETURN_IF_ERROR(recall_->LoadState(in, slots, tokens_seen_));
  }
  HW_RETURN_IF_ERROR(in.AtEnd());
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  prompt_done_ = true;
  host_pages_.Publish(tokens_seen_);
  reservation_.Resize(planned_bytes());
  NoteBytes(0);
  return absl::OkStatus();
}

absl::Status SequenceCache::LoadBlock(int block, StateReader& in,
                                      std::vector<SlotSnapshot>& slots) {
  const int64_t planned = sizes_.capacities[block];
  int64_t capacity = 0;
  HW_RETURN_IF_ERROR(
      in.Number("capacity", budget_.bounded_decode ? planned : 1, planned, capacity));
  const size_t first = slots.size();
  std::vector<Position> on_device;
  for (int set = 0; set < blocks_.sets.own_sets; ++set) {
    std::vector<Position>& positions = slots.emplace_back().positions;
    HW_RETURN_IF_ERROR(in.Array(positions));
    if (static_cast<int64_t>(positions.size()) > capacity) {
      return absl::DataLossError(
          absl::StrCat("state: a set has ", positions.size(), " slots, want at most ", capacity));
    }
    on_device.insert(on_device.end(), positions.begin(), positions.end());
    on_device.resize(static_cast<size_t>((set + 1) * capacity), kNoPosition);
  }
  HW_RETURN_IF_ERROR(CheckBlock(block, std::span(slots).subspan(first), tokens_seen_));
  HW_ASSIGN_OR_RETURN(
      LayerStorage storage,
      LayerStorage::Create(blocks_.shape, blocks_.sets.own_sets, capacity, memory_, stream_));
  Backend& backend = memory_.backend();
  for (const DeviceSpan<std::byte> buffer : storage.contents()) {
    std::vector<std::byte> bytes;
    HW_RETURN_IF_ERROR(in.Array(bytes));
    if (static_cast<int64_t>(bytes.size()) != buffer.size()) {
      return absl::DataLossError(
          absl::StrCat("state: a block has ", bytes.size(), " bytes, want ", buffer.size()));
    }
    HW_RETURN_IF_ERROR(backend.CopyToDevice(buffer, bytes, stream_));
    HW_RETURN_IF_ERROR(backend.Synchronize(stream_));  // `bytes` goes
  }
  HW_RETURN_IF_ERROR(backend.CopyToDevice(DeviceBytes(storage.View(blocks_.shape).positions),
                                          std::as_bytes(std::span(on_device)), stream_));
  HW_RETURN_IF_ERROR(backend.Synchronize(stream_));
  for (int set = 0; set < blocks_.sets.own_sets; ++set) {
    storage.table(set).Restore(slots[first + static_cast<size_t>(set)].positions);
  }
  storage_.push_back(std::move(storage));
  AddBlockHash(block);
  return absl::OkStatus();
}

absl::Status RankCache::LoadState(SequenceId sequence, SequenceOptions options,
                                  std::span<const std::byte> state,
                                  std::span<const std::span<const std::byte>> pages,
                                  int64_t tokens_seen) {
  if (tokens_seen < options.prompt_tokens || tokens_seen > options.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens_seen is ", tokens_seen, ", want ",
                                                   options.prompt_tokens, " to ",
                                                   options.max_tokens));
  }
  options.restored_tokens = tokens_seen;
  const int64_t page_tokens = options_.shape.page_tokens;
  const int64_t want_pages =
      options.policy.recall.enabled ? (tokens_seen + page_tokens - 1) / page_tokens : 0;
  if (static_cast<int64_t>(pages.size()) != want_pages) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages are ", pages.size(), ", want ", want_pages));
  }
  HW_RETURN_IF_ERROR(Open(sequence, options));
  const absl::Status loaded = sequences_[sequence]->LoadState(state, pages);
  if (!loaded.ok()) HW_RETURN_IF_ERROR(Close(sequence));
  return loaded;
}

}  // namespace heavywater
