#include "worker/server/model_info.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/version.h"

namespace heavywater {
namespace {

constexpr size_t kMaxMessageBytes = 1 << 20;

// Collects entries into messages of a bounded size.
class MessageCutter {
 public:
  explicit MessageCutter(std::vector<v1::GetModelResponse>& messages) : messages_(messages) {}

  // The message that has room for one entry of `bytes` more.
  v1::GetModelResponse& For(size_t bytes) {
    if (bytes_ + bytes > kMaxMessageBytes) {
      messages_.emplace_back();
      bytes_ = 0;
    }
    bytes_ += bytes;
    return messages_.back();
  }

 private:
  static constexpr size_t kStartBytes = kMaxMessageBytes;  // a new message first
  std::vector<v1::GetModelResponse>& messages_;
  size_t bytes_ = kStartBytes;
};

constexpr size_t kEntryBytes = 24;  // around the text, at most

const char* SpacePrefixName(SpacePrefix prefix) {
  switch (prefix) {
    case SpacePrefix::kNever:
      return "never";
    case SpacePrefix::kEverySegment:
      return "every_segment";
    case SpacePrefix::kEverySegmentButSpaces:
      return "every_segment_but_spaces";
    case SpacePrefix::kStartButSpaces:
      return "start_but_spaces";
  }
  return "";
}

// Numbers of the scaling itself are the model's, whose hash has them.
std::string RopeName(const ModelConfig& config) {
  const std::string base = absl::StrCat("base ", config.rope_base);
  switch (config.rope_scaling.kind) {
    case RopeScaling::Kind::kNone:
      return base;
    case RopeScaling::Kind::kLinear:
      return absl::StrCat(base, ", linear ", config.rope_scaling.factor);
    case RopeScaling::Kind::kLlama3:
      return absl::StrCat(base, ", llama3 ", config.rope_scaling.factor);
    case RopeScaling::Kind::kYarn:
      return absl::StrCat(base, ", yarn ", config.rope_scaling.factor);
  }
  return base;
}

}  // namespace

v1::Fingerprint MakeFingerprint(const ModelConfig& config, const std::string& content_hash,
                                const KvShape& shape) {
  v1::Fingerprint fingerprint;
  fingerprint.set_model(absl::StrCat(config.name, "/", content_hash));
  fingerprint.set_dtype(std::string(KvDtypeName(shape.dtype)));
  fingerprint.set_num_layers(shape.num_layers);
  fingerprint.set_num_kv_heads(shape.total_kv_heads);
  fingerprint.set_head_dim(shape.head_dim);
  fingerprint.set_rope(RopeName(config));
  fingerprint.set_positions("absolute");
  fingerprint.set_page_tokens(shape.page_tokens);
  fingerprint.set_format_version(kPageFormatVersion);
  return fingerprint;
}

v1::ModelInfo MakeModelInfo(const ModelConfig& config, const TokenizerSpec& tokenizer,
                            const v1::Fingerprint& fingerprint, int tensor_parallel,
                            const std::string& default_policy) {
  v1::ModelInfo info;
  info.set_name(config.name);
  info.set_architecture(config.architecture);
  info.set_num_layers(config.num_layers);
  info.set_num_query_heads(config.num_query_heads);
  info.set_num_kv_heads(config.num_kv_heads);
  info.set_head_dim(config.head_dim);
  info.set_hidden_size(config.hidden_size);
  info.set_vocab_size(config.vocab_size);
  info.set_context_tokens(static_cast<int32_t>(config.context_length));
  *info.mutable_fingerprint() = fingerprint;
  info.set_tensor_parallel(tensor_parallel);
  info.set_tokenizer_model(tokenizer.model);
  info.set_pre_tokenizer(tokenizer.pre_tokenizer);
  info.set_add_bos(tokenizer.adds_begin_of_text && tokenizer.begin_of_text != kNoToken);
  info.set_bos_token(tokenizer.begin_of_text);
  info.set_eos_token(tokenizer.end_of_turn);
  info.set_chat_template(tokenizer.chat_template);
  info.set_space_prefix(SpacePrefixName(tokenizer.space_prefix));
  info.set_unknown_token(tokenizer.unknown);
  info.mutable_other_end_tokens()->Assign(tokenizer.other_ends.begin(), tokenizer.other_ends.end());
  info.set_server_version(kVersion);
  info.set_default_policy(default_policy);
  return info;
}

std::vector<v1::GetModelResponse> MakeModelMessages(const v1::ModelInfo& info,
                                                    const TokenizerSpec& tokenizer) {
  std::vector<v1::GetModelResponse> messages(1);
  *messages.front().mutable_model() = info;
  MessageCutter cutter(messages);
  for (size_t i = 0; i < tokenizer.tokens.size(); ++i) {
    v1::Piece piece;
    piece.set_text(tokenizer.tokens[i]);
    piece.set_type(static_cast<int32_t>(tokenizer.token_types[i]));
    if (!tokenizer.scores.empty()) piece.set_score(tokenizer.scores[i]);
    *cutter.For(tokenizer.tokens[i].size() + kEntryBytes).add_pieces() = std::move(piece);
  }
  for (const std::string& merge : tokenizer.merges) {
    *cutter.For(merge.size() + kEntryBytes).add_merges() = merge;
  }
  return messages;
}

}  // namespace heavywater
