// Records of one sequence's pages, and a sequence from its records.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/sequence_pages.h"

namespace heavywater {
namespace {

// In the place of a rank. Records of state format 1 have nothing like it.
constexpr int64_t kContestedFollow = -1;

std::string PageRecord(const PageEntry& entry) {
  const int64_t flags =
      int64_t{entry.direct} | int64_t{entry.sealed} << 1 | int64_t{entry.stuck} << 2 |
      int64_t{static_cast<uint8_t>(entry.coding)} << 3 | int64_t{entry.shared} << 5 |
      int64_t{entry.rounded} << 6 | int64_t{entry.resting} << 7 | int64_t{entry.tier} << 8 |
      int64_t{static_cast<uint16_t>(entry.rank)} << 16 | int64_t{entry.contested} << 32;
  RecordWriter writer;
  writer.Add(entry.offset);
  writer.Add(int64_t{entry.crc} | int64_t{entry.rows_written} << 32);
  writer.Add(flags);
  return writer.Take();
}

void AddSet(const absl::flat_hash_set<int>& ranks, RecordWriter& writer) {
  writer.Add(static_cast<int64_t>(ranks.size()));
  for (const int rank : ranks) writer.Add(rank);
}

absl::Status DataLoss(SequenceId id, const char* what) {
  return absl::DataLossError(absl::StrCat("the state of sequence ", id, ": ", what));
}

bool IsRank(int64_t rank, const SequenceSpec& spec) { return rank >= 0 && rank < spec.num_ranks; }

bool LoadSet(RecordReader& reader, const SequenceSpec& spec, absl::flat_hash_set<int>* ranks) {
  for (int64_t left = reader.NextCount(1); left > 0; --left) {
    const int64_t rank = reader.Next();
    if (!IsRank(rank, spec)) return false;
    ranks->insert(static_cast<int>(rank));
  }
  return true;
}

}  // namespace

void SequencePages::TrackChanges() {
  tracks_ = true;
  changed_ = true;
}

void SequencePages::TakeChanges(const Kept& kept, StateBatch& batch) {
  for (const Key key : std::exchange(touched_, {})) {
    std::string name = StateKey(StateKind::kPage, spec_.sequence, key);
    const auto entry = pages_.find(key);
    if (entry == pages_.end()) {
      batch.Delete(std::move(name));
    } else {
      batch.Put(std::move(name), PageRecord(entry->second));
    }
  }
  if (!tracks_ || !std::exchange(changed_, false)) return;
  RecordWriter writer;
  writer.Add(static_cast<int64_t>(spec_.fingerprint));
  for (const int64_t value :
       {int64_t{spec_.geometry.num_layers}, int64_t{spec_.geometry.num_kv_heads},
        int64_t{spec_.geometry.page_tokens}, int64_t{spec_.geometry.row_bytes},
        int64_t{spec_.num_ranks}, spec_.max_tokens, spec_.prompt_tokens, watermarks_offset_,
        int64_t{kept.released}, kept.promised_bytes}) {
    writer.Add(value);
  }
  writer.Add(static_cast<int64_t>(heads_.size()));
  for (const auto& [rank, heads] : heads_) {
    for (const int value : {rank, heads.first, heads.count}) writer.Add(value);
  }
  AddSet(writers_, writer);
  AddSet(streamers_, writer);
  AddSet(stopped_, writer);
  for (const auto& [rank, spans] : skipped_) {
    for (const PageSpan& span : spans) {
      for (const int64_t value : {int64_t{rank}, span.begin, span.end}) writer.Add(value);
    }
  }
  if (!cells_.empty() || !contested_.empty()) {
    writer.Add(kContestedFollow);
    SaveContested(writer);
  }
  batch.Put(StateKey(StateKind::kPages, spec_.sequence), writer.Take());
}

absl::StatusOr<SequencePages> SequencePages::Load(SequenceId id, std::string_view record,
                                                  Slab& slab, Kept* kept) {
  RecordReader reader(record);
  SequenceSpec spec = {.sequence = id};
  spec.fingerprint = static_cast<FingerprintId>(reader.Next());
  spec.geometry.num_layers = static_cast<int>(reader.Next());
  spec.geometry.num_kv_heads = static_cast<int>(reader.Next());
  spec.geometry.page_tokens = static_cast<int>(reader.Next());
  spec.geometry.row_bytes = static_cast<int>(reader.Next());
  const int64_t num_ranks = reader.Next();
  spec.max_tokens = reader.Next();
  spec.prompt_tokens = reader.Next();
  const int64_t watermarks_offset = reader.Next();
  kept->released = reader.Next() != 0;
  kept->promised_bytes = reader.Next();
  if (!spec.geometry.Validate().ok() || num_ranks < 1 || num_ranks > kMaxWriters ||
      spec.max_tokens < 1 || kept->promised_bytes < 0) {
    return DataLoss(id, "impossible sizes");
  }
  spec.num_ranks = static_cast<int>(num_ranks);
  HW_RETURN_IF_ERROR(slab.Take(watermarks_offset, WatermarksBytes(spec.num_ranks)));
  SequencePages pages(spec, watermarks_offset, slab, KeepWatermarks());
  HW_RETURN_IF_ERROR(pages.LoadSets(reader));
  return pages;
}

absl::Status SequencePages::LoadSets(RecordReader& reader) {
  const SequenceId id = spec_.sequence;
  for (int64_t left = reader.NextCount(3); left > 0; --left) {
    const int64_t rank = reader.Next();
    const HeadRange heads = {static_cast<int>(reader.Next()), static_cast<int>(reader.Next())};
    if (!IsRank(rank, spec_) || heads.first < 0 || heads.count < 0 ||
        heads.first + heads.count > spec_.geometry.num_kv_heads) {
      return DataLoss(id, "impossible heads");
    }
    heads_[static_cast<int>(rank)] = heads;
  }
  if (!LoadSet(reader, spec_, &writers_) || !LoadSet(reader, spec_, &streamers_) ||
      !LoadSet(reader, spec_, &stopped_)) {
    return DataLoss(id, "impossible ranks");
  }
  while (!reader.Finish().ok()) {
    const int64_t rank = reader.Next();
    if (rank == kContestedFollow) {
      HW_RETURN_IF_ERROR(LoadContested(reader));
      return reader.Finish();
    }
    const PageSpan span = {reader.Next(), reader.Next()};
    if (!IsRank(rank, spec_) || span.begin < 0 || span.end <= span.begin) {
      return DataLoss(id, "damaged, or impossible pages that were given up");
    }
    skipped_[static_cast<int>(rank)].push_back(span);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<PagePlace>> SequencePages::LoadPage(uint64_t number,
                                                                 std::string_view record,
                                                                 PageHolders& holders) {
  RecordReader reader(record);
  PageEntry entry;
  entry.offset = reader.Next();
  const int64_t sums = reader.Next();
  entry.crc = static_cast<uint32_t>(sums);
  entry.rows_written = static_cast<int32_t>(sums >> 32);
  const int64_t flags = reader.Next();
  HW_RETURN_IF_ERROR(reader.Finish());
  entry.direct = (flags & 1) != 0;
  entry.sealed = (flags >> 1 & 1) != 0;
  entry.stuck = (flags >> 2 & 1) != 0;
  entry.coding = static_cast<PageDtype>(flags >> 3 & 3);
  const bool shared = (flags >> 5 & 1) != 0;
  entry.rounded = (flags >> 6 & 1) != 0;
  entry.tier = static_cast<uint8_t>(flags >> 8);
  entry.rank = static_cast<int16_t>(flags >> 16);
  entry.contested = flags >> 32 == 1;  // version 1 wrote a rank of -1 over all bits above
  const Key key = number;
  if (PageOfKey(key) >= spec_.geometry.PagesFor(spec_.max_tokens) ||
      static_cast<int>(key >> 10 & 1023) >= spec_.geometry.num_layers ||
      static_cast<int>(key & 1023) >= spec_.geometry.num_kv_heads ||
      !(IsRank(entry.rank, spec_) || entry.rank == kNoRank) || (shared && !entry.sealed) ||
      entry.rows_written < 0 || entry.rows_written > spec_.geometry.page_tokens ||
      entry.tier >= kMaxTiers) {
    return DataLoss(spec_.sequence, "an impossible page");
  }
  if (entry.tier != kHostTier) {
    ++num_below_;
  } else if (!shared || holders.Holders(entry.offset) == 0) {
    HW_RETURN_IF_ERROR(slab_.Take(entry.offset, spec_.geometry.page_bytes()));
  }
  if (shared) {
    if (!holders.Add(entry.offset, entry.crc)) {
      return DataLoss(spec_.sequence, "a page of another sequence that is not the same");
    }
    MarkShared(entry, true);
  }
  PageEntry& loaded = pages_[key] = entry;
  SetResting(key, loaded, (flags >> 7 & 1) != 0);
  if (entry.tier == kHostTier) return std::nullopt;
  return PlaceOf(key, entry);
}

}  // namespace heavywater
