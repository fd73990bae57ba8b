#include "tests/worker/server/tiny_model.h"

#include <vector>

#include "tests/worker/model/tiny_llama.h"
#include "worker/model/byte_alphabet.h"
#include "worker/server/worker_config.h"

namespace heavywater {
namespace {

std::vector<std::string> Pieces() {
  std::vector<std::string> pieces;
  for (int byte = 0; byte < 256; ++byte) {
    pieces.emplace_back(ByteToAlphabet(static_cast<unsigned char>(byte)));
  }
  pieces.insert(pieces.end(), {"ab", "bc", "abc", "aa", "<end>"});
  return pieces;
}

const std::vector<std::string>& Merges() {
  static const auto* const merges = new std::vector<std::string>{"b c", "a b", "a bc", "a a"};
  return *merges;
}

std::vector<int32_t> Types() {
  std::vector<int32_t> types(kTinyVocab, static_cast<int32_t>(TokenType::kNormal));
  types[kTinyEnd] = static_cast<int32_t>(TokenType::kControl);
  return types;
}

std::string File() {
  TinyLlama llama({.layers = kTinyLayers, .head_dim = kTinyHeadDim, .vocab = kTinyVocab},
                  /*seed=*/11);
  return llama.Writer()
      .Field("tokenizer.ggml.model", "gpt2")
      .Field("tokenizer.ggml.pre", "smollm")
      .Field("tokenizer.ggml.tokens", Pieces())
      .Field("tokenizer.ggml.token_type", Types())
      .Field("tokenizer.ggml.merges", Merges())
      .Field("tokenizer.ggml.eos_token_id", uint32_t{kTinyEnd})
      .Field("tokenizer.chat_template", "{{ messages }}")
      .Finish();
}

}  // namespace

TinyModel::TinyModel() : file_(File()) {}

Tokenizer TinyTokenizer() {
  TokenizerSpec spec;
  spec.model = "gpt2";
  spec.pre_tokenizer = "smollm";
  spec.tokens = Pieces();
  for (int32_t type : Types()) spec.token_types.push_back(static_cast<TokenType>(type));
  spec.merges = Merges();
  spec.end_of_turn = kTinyEnd;
  return *Tokenizer::Create(std::move(spec));
}

v1::WorkerConfig TinyConfig(const TinyModel& model, int rank, int size) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model(model.path());
  config.set_rank(rank);
  config.set_size(size);
  config.set_kv_dtype("fp32");
  config.set_page_tokens(8);
  config.set_prompt_chunk_tokens(8);
  config.set_max_batch(8);
  config.set_reserve_ahead_tokens(8);
  config.set_report_interval_plans(4);
  config.set_comm_timeout_ms(20'000);
  return config;
}

}  // namespace heavywater
