// A small Llama model with random weights, and what it must compute.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/worker/model/gguf_writer.h"

namespace heavywater {

// Sizes chosen so that nothing is a power of two by accident and three ranks get
// unequal shares of the feed-forward and of the vocabulary.
struct TinyLlamaShape {
  int layers = 2;
  int hidden = 48;
  int query_heads = 6;
  int kv_heads = 3;
  int head_dim = 10;
  int ffn = 136;
  int vocab = 100;
  bool tied = true;
  bool rope_factors = false;
};

class TinyLlama {
 public:
  TinyLlama(const TinyLlamaShape& shape, uint64_t seed);

  // All fields and tensors; a test may add or spoil some.
  GgufWriter Writer() const;
  std::string File() const { return Writer().Finish(); }

  // Logits [tokens][vocab] of causal attention over the whole text, by the
  // textbook, in double: no cache, no shards, no code shared with the runner.
  std::vector<double> Logits(const std::vector<int32_t>& tokens) const;

  const TinyLlamaShape& shape() const { return shape_; }

 private:
  using Vector = std::vector<double>;

  void AddWeights(const std::string& name, int rows, int cols, double scale, double offset);
  Vector Multiply(const std::string& name, const Vector& x) const;
  Vector Norm(const std::string& name, const Vector& x) const;
  // Rotates as GGUF stores it: neighbours 2i and 2i + 1 of a head are a pair.
  void Rotate(int position, Vector& heads) const;
  // Attention of the last of the tokens whose keys and values are given.
  Vector Attend(const Vector& q, const std::vector<Vector>& keys,
                const std::vector<Vector>& values) const;

  TinyLlamaShape shape_;
  uint64_t seed_;
  uint64_t drawn_ = 0;
  std::map<std::string, std::vector<float>> weights_;
  std::vector<std::string> order_;
  std::map<std::string, std::pair<int, int>> sizes_;
};

}  // namespace heavywater
