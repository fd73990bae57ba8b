// What each matrix of a rank is made of: rows and columns of a file's tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/model/llama_weights.h"
#include "worker/model/model_config.h"
#include "worker/model/rank_shard.h"

namespace heavywater {

enum class WeightKind {
  kMatrix,
  kVector,          // one row
  kStandingVector,  // a vector of which rows are taken, as of the matrix it belongs to: a bias
};

// Rows of one tensor, which lie one below the other in the matrix.
struct WeightPart {
  std::string tensor;                     // GGUF's name, "blk.0.attn_q.weight"
  WeightKind kind = WeightKind::kMatrix;  // the same in all parts of a matrix
  int64_t rows = 0;                       // what the tensor must be; cols are 1 of a bias
  int64_t cols = 0;
  Range taken_rows;  // what is taken of it
  Range taken_columns;
  // Rows 2i and 2i + 1 of a head of so many rows go to i and i + half: GGUF stores them
  // for a rotation that pairs neighbours. 0: they stay.
  int64_t head_rows = 0;

  // Where row `index` of those taken goes, among as many.
  int64_t TargetRow(int64_t index) const;
};

struct MatrixParts {
  WeightMatrix* matrix;
  std::vector<WeightPart> parts;

  WeightKind kind() const { return parts.front().kind; }
  int64_t rows() const;
  int64_t cols() const { return parts.front().taken_columns.size; }
};

// All matrices of the rank, in the order in which they lie; the result points into
// `weights`, of which only the number of layers changes. A tied output has no matrix of
// its own.
std::vector<MatrixParts> PartsOf(const ModelConfig& config, const RankShard& shard,
                                 LlamaWeights& weights);

}  // namespace heavywater
