// A GGUF file of a Llama whose weights are random, quickly made: shapes as a real
// model's, fewer layers.
#pragma once

#include <string>

namespace heavywater {

struct LlamaFileShape {
  int layers = 2;
  int hidden = 4096;
  int query_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int ffn = 14336;
  int vocab = 4096;
};

// Matrices in fp16, each weight uniform and as large as keeps activations bounded;
// norms are 1. The same for the same shape.
std::string RandomLlamaFile(const LlamaFileShape& shape);

}  // namespace heavywater
