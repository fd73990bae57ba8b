// A Model whose Q, K and V follow from the layer, the token and its position
// alone (made from a seed, or recorded): the same on every rank, in every batch,
// whatever attention returned. It remembers what attention returned.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "worker/cache/kv_layout.h"
#include "worker/rank/model.h"

namespace heavywater {

// Q, K and V of the whole model for one token: [total heads][head_dim] each.
struct SyntheticRow {
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
};
// `shape`: of any rank.
SyntheticRow MakeSyntheticRow(const KvShape& shape, uint64_t seed, int layer, int32_t token,
                              Position position);

using RowSource = std::function<SyntheticRow(int layer, int32_t token, Position position)>;

class SyntheticModel final : public Model {
 public:
  static constexpr int kHiddenSize = 4;  // the first element is the token
  static constexpr int kVocabSize = 8;

  // `shape`: this rank's; `first_query_head` counts over the model.
  SyntheticModel(const KvShape& shape, int first_query_head, RowSource rows)
      : shape_(shape), first_query_head_(first_query_head), rows_(std::move(rows)) {}

  int hidden_size() const override { return kHiddenSize; }
  int vocab_size() const override { return kVocabSize; }
  absl::Status Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                     Stream& stream) override;
  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;
  absl::Status FinishLayer(int layer, DeviceSpan<const float> attention, DeviceSpan<float> hidden,
                           Stream& stream) override;
  // logits[j] = 10 * token + j
  absl::Status ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                             Stream& stream) override;

  // What attention returned last for this rank's heads, [num_query_heads][head_dim].
  const std::vector<float>& attention(int layer, int32_t token, Position position) const;

 private:
  const KvShape shape_;
  const int first_query_head_;
  const RowSource rows_;
  std::vector<Position> positions_;  // of the rows between ComputeQkv and FinishLayer
  std::map<std::tuple<int, int32_t, Position>, std::vector<float>> attention_;
};

}  // namespace heavywater
