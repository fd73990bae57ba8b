#include "tests/worker/model/tiny_llama.h"

#include <algorithm>
#include <cmath>

#include "worker/model/sampler.h"

namespace heavywater {
namespace {

constexpr double kRopeBase = 500.0;
constexpr double kEpsilon = 1e-5;

std::string Layer(int index, const char* name) {
  return "blk." + std::to_string(index) + "." + name;
}

}  // namespace

TinyLlama::TinyLlama(const TinyLlamaShape& shape, uint64_t seed) : shape_(shape), seed_(seed) {
  const int q = shape.query_heads * shape.head_dim;
  const int kv = shape.kv_heads * shape.head_dim;
  const double scale = 2.0 / std::sqrt(shape.hidden);
  AddWeights("token_embd", shape.vocab, shape.hidden, 1.0, 0);
  AddWeights("output_norm", 0, shape.hidden, 0.5, 1);
  if (!shape.tied) AddWeights("output", shape.vocab, shape.hidden, 1.0, 0);
  if (shape.rope_factors) AddWeights("rope_freqs", 0, shape.head_dim / 2, 0.5, 2);
  for (int i = 0; i < shape.layers; ++i) {
    AddWeights(Layer(i, "attn_norm"), 0, shape.hidden, 0.5, 1);
    AddWeights(Layer(i, "attn_q"), q, shape.hidden, scale, 0);
    AddWeights(Layer(i, "attn_k"), kv, shape.hidden, scale, 0);
    AddWeights(Layer(i, "attn_v"), kv, shape.hidden, scale, 0);
    AddWeights(Layer(i, "attn_output"), shape.hidden, q, scale, 0);
    AddWeights(Layer(i, "ffn_norm"), 0, shape.hidden, 0.5, 1);
    AddWeights(Layer(i, "ffn_gate"), shape.ffn, shape.hidden, scale, 0);
    AddWeights(Layer(i, "ffn_up"), shape.ffn, shape.hidden, scale, 0);
    AddWeights(Layer(i, "ffn_down"), shape.hidden, shape.ffn, scale, 0);
  }
}

void TinyLlama::AddWeights(const std::string& name, int rows, int cols, double scale,
                           double offset) {
  std::vector<float>& values = weights_[name];
  for (int i = 0; i < std::max(rows, 1) * cols; ++i) {
    const double uniform = 2 * UniformAt(seed_, drawn_++) - 1;
    values.push_back(static_cast<float>(offset + scale * uniform));
  }
  order_.push_back(name);
  sizes_[name] = {rows, cols};
}

GgufWriter TinyLlama::Writer() const {
  const auto number = [](int value) { return static_cast<uint32_t>(value); };
  GgufWriter writer;
  writer.Field("general.architecture", "llama")
      .Field("general.name", "tiny")
      .Field("llama.block_count", number(shape_.layers))
      .Field("llama.context_length", number(64))
      .Field("llama.embedding_length", number(shape_.hidden))
      .Field("llama.feed_forward_length", number(shape_.ffn))
      .Field("llama.attention.head_count", number(shape_.query_heads))
      .Field("llama.attention.head_count_kv", number(shape_.kv_heads))
      .Field("llama.attention.key_length", number(shape_.head_dim))
      .Field("llama.attention.value_length", number(shape_.head_dim))
      .Field("llama.rope.freq_base", static_cast<float>(kRopeBase))
      .Field("llama.attention.layer_norm_rms_epsilon", static_cast<float>(kEpsilon));
  for (const std::string& name : order_) {
    const auto [rows, cols] = sizes_.at(name);
    writer.Tensor(name + ".weight", rows, cols, weights_.at(name));
  }
  return writer;
}

TinyLlama::Vector TinyLlama::Multiply(const std::string& name, const Vector& x) const {
  const std::vector<float>& weights = weights_.at(name);
  Vector out(weights.size() / x.size());
  for (size_t row = 0; row < out.size(); ++row) {
    for (size_t i = 0; i < x.size(); ++i) out[row] += weights[row * x.size() + i] * x[i];
  }
  return out;
}

TinyLlama::Vector TinyLlama::Norm(const std::string& name, const Vector& x) const {
  double sum = 0;
  for (const double value : x) sum += value * value;
  const double factor = 1 / std::sqrt(sum / static_cast<double>(x.size()) + kEpsilon);
  Vector out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * factor * weights_.at(name)[i];
  return out;
}

void TinyLlama::Rotate(int position, Vector& heads) const {
  for (size_t i = 0; i < heads.size(); i += 2) {
    const auto pair = (i % static_cast<size_t>(shape_.head_dim)) / 2;
    double angle =
        position * std::pow(kRopeBase, -2.0 * static_cast<double>(pair) / shape_.head_dim);
    if (shape_.rope_factors) angle /= weights_.at("rope_freqs")[pair];
    const double first = heads[i];
    const double second = heads[i + 1];
    heads[i] = first * std::cos(angle) - second * std::sin(angle);
    heads[i + 1] = second * std::cos(angle) + first * std::sin(angle);
  }
}

TinyLlama::Vector TinyLlama::Attend(const Vector& q, const std::vector<Vector>& keys,
                                    const std::vector<Vector>& values) const {
  const auto dim = static_cast<size_t>(shape_.head_dim);
  const int group = shape_.query_heads / shape_.kv_heads;
  Vector out(q.size());
  for (int head = 0; head < shape_.query_heads; ++head) {
    const size_t q_at = static_cast<size_t>(head) * dim;
    const size_t kv_at = static_cast<size_t>(head / group) * dim;
    Vector weights;
    double total = 0;
    for (const Vector& key : keys) {
      double dot = 0;
      for (size_t i = 0; i < dim; ++i) dot += q[q_at + i] * key[kv_at + i];
      weights.push_back(std::exp(dot / std::sqrt(shape_.head_dim)));
      total += weights.back();
    }
    for (size_t t = 0; t < values.size(); ++t) {
      for (size_t i = 0; i < dim; ++i) out[q_at + i] += weights[t] / total * values[t][kv_at + i];
    }
  }
  return out;
}

std::vector<double> TinyLlama::Logits(const std::vector<int32_t>& tokens) const {
  std::vector<std::vector<Vector>> keys(static_cast<size_t>(shape_.layers));
  std::vector<std::vector<Vector>> values = keys;
  std::vector<double> logits;
  const auto add = [](const Vector& x, Vector& sum) {
    for (size_t i = 0; i < x.size(); ++i) sum[i] += x[i];
  };
  for (size_t t = 0; t < tokens.size(); ++t) {
    const auto row = weights_.at("token_embd").begin() + tokens[t] * shape_.hidden;
    Vector x(row, row + shape_.hidden);
    for (int i = 0; i < shape_.layers; ++i) {
      const auto layer = static_cast<size_t>(i);
      Vector normed = Norm(Layer(i, "attn_norm"), x);
      Vector q = Multiply(Layer(i, "attn_q"), normed);
      Vector k = Multiply(Layer(i, "attn_k"), normed);
      Rotate(static_cast<int>(t), q);
      Rotate(static_cast<int>(t), k);
      keys[layer].push_back(k);
      values[layer].push_back(Multiply(Layer(i, "attn_v"), normed));
      add(Multiply(Layer(i, "attn_output"), Attend(q, keys[layer], values[layer])), x);
      normed = Norm(Layer(i, "ffn_norm"), x);
      Vector inner = Multiply(Layer(i, "ffn_gate"), normed);
      const Vector up = Multiply(Layer(i, "ffn_up"), normed);
      for (size_t j = 0; j < inner.size(); ++j) inner[j] *= up[j] / (1 + std::exp(-inner[j]));
      add(Multiply(Layer(i, "ffn_down"), inner), x);
    }
    const Vector out = Multiply(shape_.tied ? "token_embd" : "output", Norm("output_norm", x));
    logits.insert(logits.end(), out.begin(), out.end());
  }
  return logits;
}

}  // namespace heavywater
