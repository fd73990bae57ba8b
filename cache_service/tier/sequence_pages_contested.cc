// A rank goes on with another process while the one before may still write in the slab: what
// that one can reach is not used again before it has stopped, and the new one gets copies.
#include <algorithm>
#include <utility>

#include "cache_service/base/status.h"
#include "cache_service/tier/sequence_pages.h"

namespace heavywater {

void SequencePages::Contest(int rank, int64_t tokens, std::optional<int64_t> cell) {
  // Rows below are there whatever the other does: it only writes behind its own watermark.
  const int64_t watermark = Watermark(rank);
  ContestedMemory& memory = contested_[rank];
  if (cell.has_value()) {
    const auto [known, added] = cells_.try_emplace(rank, *cell);
    if (!added) memory.cells.push_back(std::exchange(known->second, *cell));
    WatermarkCell(rank).store(watermark, std::memory_order_release);
  }
  writers_.erase(rank);
  for (auto& [key, entry] : pages_) {
    const int64_t end = (PageOfKey(key) + 1) * spec_.geometry.page_tokens;
    const bool own = entry.rank == rank && entry.tier == kHostTier && !entry.shared;
    if (!own || end <= std::min(watermark, tokens)) continue;
    entry.contested = true;
    Touch(key);
  }
  NoteChange();
}

ContestedMemory SequencePages::EndContest(int rank) {
  const auto found = contested_.find(rank);
  if (found == contested_.end()) return {};
  ContestedMemory memory = std::move(found->second);
  contested_.erase(found);
  num_contested_ -= static_cast<int64_t>(memory.pages.size());
  for (auto& [key, entry] : pages_) {
    if (entry.rank != rank || !entry.contested) continue;
    entry.contested = false;
    Touch(key);
  }
  NoteChange();
  return memory;
}

std::vector<int> SequencePages::ContestedRanks() const {
  std::vector<int> ranks;
  for (const auto& [rank, memory] : contested_) ranks.push_back(rank);
  return ranks;
}

void SequencePages::LetGo(const PageEntry& entry, std::vector<int64_t>* offsets) {
  if (!entry.contested) {
    offsets->push_back(entry.offset);
    return;
  }
  contested_[entry.rank].pages.push_back(entry.offset);
  ++num_contested_;
  NoteChange();
}

std::vector<int64_t> SequencePages::TakeCells() {
  std::vector<int64_t> cells;
  for (const auto& [rank, cell] : cells_) cells.push_back(cell);
  for (const auto& [rank, memory] : contested_) {
    cells.insert(cells.end(), memory.cells.begin(), memory.cells.end());
  }
  cells_.clear();
  contested_.clear();
  return cells;
}

int64_t SequencePages::num_cells() const {
  size_t cells = cells_.size();
  for (const auto& [rank, memory] : contested_) cells += memory.cells.size();
  return static_cast<int64_t>(cells);
}

void SequencePages::SaveContested(RecordWriter& writer) const {
  writer.Add(static_cast<int64_t>(cells_.size()));
  for (const auto& [rank, cell] : cells_) {
    for (const int64_t value : {int64_t{rank}, cell}) writer.Add(value);
  }
  writer.Add(static_cast<int64_t>(contested_.size()));
  for (const auto& [rank, memory] : contested_) {
    writer.Add(rank);
    for (const auto* offsets : {&memory.cells, &memory.pages}) {
      writer.Add(static_cast<int64_t>(offsets->size()));
      for (const int64_t offset : *offsets) writer.Add(offset);
    }
  }
}

absl::Status SequencePages::LoadContested(RecordReader& reader) {
  const auto is_rank = [this](int64_t rank) { return rank >= 0 && rank < spec_.num_ranks; };
  const auto damaged = [] { return absl::DataLossError("the state: impossible contested pages"); };
  for (int64_t left = reader.NextCount(2); left > 0; --left) {
    const int64_t rank = reader.Next();
    const int64_t cell = reader.Next();
    if (!is_rank(rank)) return damaged();
    HW_RETURN_IF_ERROR(slab_.Take(cell, kWatermarkCellBytes));
    cells_[static_cast<int>(rank)] = cell;
  }
  for (int64_t left = reader.NextCount(3); left > 0; --left) {
    const int64_t rank = reader.Next();
    if (!is_rank(rank)) return damaged();
    ContestedMemory& memory = contested_[static_cast<int>(rank)];
    for (int64_t cells = reader.NextCount(1); cells > 0; --cells) {
      memory.cells.push_back(reader.Next());
      HW_RETURN_IF_ERROR(slab_.Take(memory.cells.back(), kWatermarkCellBytes));
    }
    for (int64_t pages = reader.NextCount(1); pages > 0; --pages) {
      memory.pages.push_back(reader.Next());
      HW_RETURN_IF_ERROR(slab_.Take(memory.pages.back(), spec_.geometry.page_bytes()));
    }
    num_contested_ += static_cast<int64_t>(memory.pages.size());
  }
  return absl::OkStatus();
}

}  // namespace heavywater
