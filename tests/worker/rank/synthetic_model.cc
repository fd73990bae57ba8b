#include "tests/worker/rank/synthetic_model.h"

#include <algorithm>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

class Random {
 public:
  explicit Random(uint64_t state) : state_(state) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Nearly normal, variance 1.
  float Normal() {
    double sum = 0;
    for (int i = 0; i < 6; ++i) sum += static_cast<double>(Next() >> 11) * 0x1p-53;
    return static_cast<float>((sum - 3) * 1.41421356);
  }

 private:
  uint64_t state_;
};

// Queries share a direction, and some tokens' keys lie along it: heavy hitters
// exist, as in real models.
void FillHeads(Random& random, int heads, int head_dim, float along, std::vector<float>& out) {
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < head_dim; ++i) {
      out.push_back(1.2f * random.Normal() + (i % 2 == 0 ? along : -along));
    }
  }
}

}  // namespace

SyntheticRow MakeSyntheticRow(const KvShape& shape, uint64_t seed, int layer, int32_t token,
                              Position position) {
  Random random(seed ^ (static_cast<uint64_t>(layer) << 56) ^ (static_cast<uint64_t>(token) << 24) ^
                static_cast<uint64_t>(position));
  SyntheticRow row;
  const float weight = random.Next() % 8 == 0 ? 1.0f : 0.0f;
  FillHeads(random, shape.total_query_heads, shape.head_dim, 0.5f, row.q);
  FillHeads(random, shape.total_kv_heads, shape.head_dim, weight, row.k);
  FillHeads(random, shape.total_kv_heads, shape.head_dim, 0.0f, row.v);
  return row;
}

absl::Status SyntheticModel::Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                   Stream& stream) {
  HW_CHECK(hidden.size() == static_cast<int64_t>(tokens.size()) * kHiddenSize);
  std::fill_n(hidden.device_address(), hidden.size(), 0.0f);
  for (size_t i = 0; i < tokens.size(); ++i) {
    hidden.device_address()[i * kHiddenSize] = static_cast<float>(tokens[i]);
  }
  return absl::OkStatus();
}

absl::Status SyntheticModel::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                        std::span<const Position> positions, DeviceSpan<float> q,
                                        DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  positions_.assign(positions.begin(), positions.end());
  const int64_t q_width = int64_t{shape_.num_query_heads} * shape_.head_dim;
  const int64_t kv_width = int64_t{shape_.num_kv_heads} * shape_.head_dim;
  HW_CHECK(q.size() == static_cast<int64_t>(positions.size()) * q_width);
  HW_CHECK(k.size() == static_cast<int64_t>(positions.size()) * kv_width);
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto token = static_cast<int32_t>(hidden.device_address()[i * kHiddenSize]);
    const SyntheticRow row = rows_(layer, token, positions[i]);
    std::copy_n(row.q.begin() + first_query_head_ * shape_.head_dim, q_width,
                q.device_address() + i * q_width);
    std::copy_n(row.k.begin() + shape_.first_kv_head * shape_.head_dim, kv_width,
                k.device_address() + i * kv_width);
    std::copy_n(row.v.begin() + shape_.first_kv_head * shape_.head_dim, kv_width,
                v.device_address() + i * kv_width);
  }
  return absl::OkStatus();
}

absl::Status SyntheticModel::FinishLayer(int layer, DeviceSpan<const float> attention,
                                         DeviceSpan<float> hidden, Stream& stream) {
  const int64_t width = int64_t{shape_.num_query_heads} * shape_.head_dim;
  HW_CHECK(attention.size() == static_cast<int64_t>(positions_.size()) * width);
  for (size_t i = 0; i < positions_.size(); ++i) {
    const auto token = static_cast<int32_t>(hidden.device_address()[i * kHiddenSize]);
    const float* row = attention.device_address() + i * width;
    attention_[{layer, token, positions_[i]}] = std::vector<float>(row, row + width);
  }
  return absl::OkStatus();
}

absl::Status SyntheticModel::ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                                           Stream& stream) {
  const int64_t rows = hidden.size() / kHiddenSize;
  HW_CHECK(logits.size() == rows * kVocabSize);
  for (int64_t i = 0; i < rows * kVocabSize; ++i) {
    const float token = hidden.device_address()[i / kVocabSize * kHiddenSize];
    logits.device_address()[i] = 10 * token + static_cast<float>(i % kVocabSize);
  }
  return absl::OkStatus();
}

const std::vector<float>& SyntheticModel::attention(int layer, int32_t token,
                                                    Position position) const {
  const auto found = attention_.find({layer, token, position});
  HW_CHECK(found != attention_.end());
  return found->second;
}

}  // namespace heavywater
