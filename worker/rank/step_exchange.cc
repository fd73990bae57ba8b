#include "worker/rank/step_exchange.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

enum StepField : int64_t { kStep, kLength };                                   // kStepFields
enum ItemField : int64_t { kStatus, kRan, kSeen, kUsed, kPromotable, kHash };  // kItemFields

int64_t FieldOf(int64_t item, ItemField field) { return kStepFields + item * kItemFields + field; }

// Asked before slots are taken, and whatever the item's status, so that ranks
// that fail an item still agree on every length. (A rank that lacks the device
// memory for it cannot; its peers see another length.)
bool WillReduce(const ActiveItem& item) {
  return item.plans() && item.sequence->budget().uses_scores &&
         item.sequence->Fits(item.spec.num_tokens);
}

}  // namespace

void StepExchange::Layout(uint64_t step, std::span<ActiveItem> items) {
  const RankCacheOptions& options = cache_.options();
  step_ = step;
  agreement_ = Agreement(options.rank, options.world_size,
                         kStepFields + kItemFields * static_cast<int64_t>(items.size()));
  size_ = largest_size_ = agreement_.size();
  for (const bool reduced : {true, false}) {
    for (ActiveItem& item : items) {
      if (!WillReduce(item) || (item.sequence->blocks().sets.reduced_sets > 0) != reduced) continue;
      item.gains = {.sets = item.sequence->blocks().sets,
                    .begin = size_,
                    .used = item.sequence->used_after(item.spec.num_tokens),
                    .blocks_per_layer = item.sequence->blocks().per_layer};
      SequenceRecall* const recall = item.sequence->recall();
      item.recall =
          RecallRegionOf(options, item.sequence->budget(), item.sequence->options().policy,
                         item.gains.end(), recall == nullptr ? 0 : recall->region_pages());
      size_ = item.recall.end();
      largest_size_ +=
          item.gains.sets.rows() * item.sequence->total_capacity() + item.recall.size();
    }
    if (reduced) reduced_size_ = size_;
  }
  row_sums_end_ = size_;
  for (ActiveItem& item : items) {
    item.row_sums_begin = row_sums_end_;
    row_sums_end_ += item.gains.num_rows();
    largest_size_ += item.gains.num_rows();
  }
}

void StepExchange::SetAgreement(std::span<const ActiveItem> items) {
  agreement_.Set(kStep, static_cast<int64_t>(step_));
  agreement_.Set(kLength, reduced_size_);
  for (int64_t i = 0; i < static_cast<int64_t>(items.size()); ++i) {
    agreement_.Set(FieldOf(i, kStatus), static_cast<int64_t>(items[i].status.code()));
    agreement_.Set(FieldOf(i, kRan), items[i].ran() ? 1 : 0);
    const SequenceCache* sequence = items[i].sequence;
    if (sequence == nullptr) continue;
    agreement_.Set(FieldOf(i, kSeen), sequence->tokens_seen());
    agreement_.Set(FieldOf(i, kUsed), sequence->total_used());
    agreement_.Set(FieldOf(i, kHash), static_cast<int64_t>(sequence->hash().placement));
    agreement_.Set(FieldOf(i, kPromotable), items[i].sequence->host_pages().first_unbacked());
  }
}

absl::Status StepExchange::Fill(std::span<ActiveItem> items) {
  Backend& backend = cache_.backend();
  HW_ASSIGN_OR_RETURN(const DeviceSpan<int64_t> memory, cache_.workspace().Gains(largest_size_));
  buffer_ = memory.Sub(0, row_sums_end_);
  sums_.resize(row_sums_end_);
  HW_RETURN_IF_ERROR(backend.Zero(DeviceBytes(buffer_), cache_.stream()));
  HW_RETURN_IF_ERROR(CollectGains(items));
  HW_RETURN_IF_ERROR(CheckOwnRegions(items));
  SetAgreement(items);
  return backend.CopyToDevice(DeviceBytes(buffer_.Sub(0, agreement_.size())),
                              std::as_bytes(agreement_.entries()), cache_.stream());
}

absl::Status StepExchange::CollectGains(std::span<const ActiveItem> items) {
  const bool recalls = std::any_of(items.begin(), items.end(),
                                   [](const ActiveItem& item) { return item.recall.size() > 0; });
  // The picks' gains are in host memory then.
  if (recalls) HW_RETURN_IF_ERROR(cache_.backend().Synchronize(cache_.stream()));
  for (const ActiveItem& item : items) {
    if (!item.status.ok() || !item.has_gains()) continue;
    for (int block = 0; block < item.gains.num_blocks(); ++block) {
      HW_RETURN_IF_ERROR(
          cache_.backend().CollectGains(item.sequence->blocks().shape, item.sequence->View(block),
                                        item.gains.Own(buffer_, block), cache_.stream()));
    }
    if (item.recall.size() > 0) HW_RETURN_IF_ERROR(FillRecall(item));
  }
  return absl::OkStatus();
}

absl::Status StepExchange::FillRecall(const ActiveItem& item) {
  RecallRegion region = item.recall;
  region.begin = 0;
  std::vector<int64_t> entries(region.size());
  item.sequence->recall()->FillRegion(region, entries);
  return cache_.backend().CopyToDevice(
      DeviceBytes(buffer_.Sub(item.recall.begin, item.recall.size())),
      std::as_bytes(std::span(entries)), cache_.stream());
}

std::vector<int64_t> StepExchange::RecalledMass(const ActiveItem& item) const {
  std::vector<int64_t> mass;
  for (int layer = 0; layer < item.recall.num_layers; ++layer) {
    for (int row = 0; row < item.recall.rows; ++row) {
      mass.push_back(sums_[item.recall.Mass(layer, row)]);
    }
  }
  return mass;
}

PlanInput StepExchange::InputOf(int64_t index, const ActiveItem& item) const {
  PlanInput input{.gains = item.gains, .recall = item.recall, .buffer = buffer_, .sums = sums_};
  input.promotable_end = agreement_.Get(FieldOf(index, kPromotable), 0);
  for (int rank = 1; rank < cache_.options().world_size; ++rank) {
    input.promotable_end =
        std::min(input.promotable_end, agreement_.Get(FieldOf(index, kPromotable), rank));
  }
  return input;
}

absl::Status StepExchange::CheckOwnRegions(std::span<ActiveItem> items) {
  if (size_ == reduced_size_) return absl::OkStatus();
  for (const ActiveItem& item : items) {
    if (!item.reduces_gains()) HW_RETURN_IF_ERROR(SumRowsOf(item));
  }
  HW_RETURN_IF_ERROR(cache_.backend().Synchronize(cache_.stream()));
  for (ActiveItem& item : items) {
    if (!item.status.ok() || !item.has_gains() || item.reduces_gains()) continue;
    const absl::Status mass = CheckMassOf(item);
    if (!mass.ok()) item.status = Annotate(mass, absl::StrCat("rank ", cache_.options().rank));
  }
  return absl::OkStatus();
}

absl::Status StepExchange::CheckMassOf(const ActiveItem& item) const {
  return CheckMass(
      cache_.options().shape, item.sequence->options().policy.scope, item.sequence->budget().gains,
      item.gains, item.sequence->queries_since_plan() + item.spec.num_tokens,
      /*first_layer=*/0, std::span(sums_).subspan(item.row_sums_begin, item.gains.num_rows()),
      RecalledMass(item));
}

absl::Status StepExchange::SumRowsOf(const ActiveItem& item) {
  if (!item.status.ok() || !item.has_gains()) return absl::OkStatus();
  const int64_t rows = item.gains.num_rows();
  HW_RETURN_IF_ERROR(SumGainRows(item.gains, buffer_, buffer_.Sub(item.row_sums_begin, rows),
                                 cache_.backend(), cache_.stream()));
  HW_RETURN_IF_ERROR(CopyToHost(item.row_sums_begin, rows));
  return CopyToHost(item.recall.begin, item.recall.size());
}

absl::Status StepExchange::CopyToHost(int64_t begin, int64_t count) {
  if (count == 0) return absl::OkStatus();
  return cache_.backend().CopyToHost(std::as_writable_bytes(std::span(sums_).subspan(begin, count)),
                                     DeviceBytes(buffer_.Sub(begin, count)), cache_.stream());
}

absl::Status StepExchange::Read(std::span<const ActiveItem> items) {
  for (const ActiveItem& item : items) {
    if (item.reduces_gains()) HW_RETURN_IF_ERROR(SumRowsOf(item));
  }
  HW_RETURN_IF_ERROR(CopyToHost(0, agreement_.size()));
  HW_RETURN_IF_ERROR(cache_.backend().Synchronize(cache_.stream()));
  std::copy_n(sums_.begin(), agreement_.size(), agreement_.entries().begin());
  HW_RETURN_IF_ERROR(agreement_.CheckEqual(kStep, "step number"));
  return agreement_.CheckEqual(kLength,
                               absl::StrCat("number of integers to reduce in step ", step_));
}

bool StepExchange::RanAnywhere(int64_t index) const {
  return agreement_.AnySet(FieldOf(index, kRan));
}

absl::Status StepExchange::CheckItem(int64_t index, const ActiveItem& item) const {
  const std::string name = absl::StrCat("sequence ", item.spec.sequence);
  const absl::Status status = agreement_.CheckStatus(FieldOf(index, kStatus), item.status);
  if (!status.ok()) return Annotate(status, name);
  const Scope scope = item.sequence->options().policy.scope;
  const int group = HashGroup(cache_.options(), scope);
  HW_RETURN_IF_ERROR(agreement_.CheckEqual(FieldOf(index, kSeen), name + ": tokens seen"));
  HW_RETURN_IF_ERROR(agreement_.CheckEqual(FieldOf(index, kUsed), name + ": slots in use"));
  HW_RETURN_IF_ERROR(
      agreement_.CheckEqual(FieldOf(index, kHash), group, name + ": hash of the previous plan"));
  if (!item.reduces_gains()) return absl::OkStatus();
  const absl::Status mass = CheckMassOf(item);
  return mass.ok() ? mass : Annotate(mass, name);
}

}  // namespace heavywater
