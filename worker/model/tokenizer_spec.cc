#include "worker/model/tokenizer_spec.h"

#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

absl::StatusOr<std::string> ReadKnown(const GgufFile& file, std::string_view field,
                                      std::string_view want) {
  HW_ASSIGN_OR_RETURN(const auto got, file.GetString(field));
  if (got != want) {
    return absl::UnimplementedError(
        Message("field '", field, "' is '", got, "', want '", want, "'"));
  }
  return std::string(got);
}

absl::StatusOr<bool> ReadFlag(const GgufFile& file, std::string_view field) {
  if (!file.Has(field)) return false;
  return file.GetBool(field);
}

absl::StatusOr<int32_t> ReadTokenId(const GgufFile& file, std::string_view field,
                                    size_t vocab_size) {
  if (!file.Has(field)) return kNoToken;
  HW_ASSIGN_OR_RETURN(const int64_t id, file.GetInteger(field));
  if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
    return absl::InvalidArgumentError(
        Message("field '", field, "' is ", id, ", want a token below ", vocab_size));
  }
  return static_cast<int32_t>(id);
}

absl::Status ReadVocabulary(const GgufFile& file, TokenizerSpec& spec) {
  HW_ASSIGN_OR_RETURN(const auto tokens, file.GetStrings("tokenizer.ggml.tokens"));
  if (tokens.empty()) {
    return absl::InvalidArgumentError("field 'tokenizer.ggml.tokens' is empty");
  }
  spec.tokens.assign(tokens.begin(), tokens.end());
  HW_ASSIGN_OR_RETURN(const auto merges, file.GetStrings("tokenizer.ggml.merges"));
  spec.merges.assign(merges.begin(), merges.end());
  HW_ASSIGN_OR_RETURN(const auto types, file.GetInt32s("tokenizer.ggml.token_type"));
  if (types.size() != tokens.size()) {
    return absl::InvalidArgumentError(Message("field 'tokenizer.ggml.token_type' has ",
                                              types.size(), " elements, want ", tokens.size()));
  }
  for (const int32_t type : types) spec.token_types.push_back(static_cast<TokenType>(type));
  return absl::OkStatus();
}

absl::Status ReadSpecialTokens(const GgufFile& file, TokenizerSpec& spec) {
  const size_t size = spec.tokens.size();
  HW_ASSIGN_OR_RETURN(spec.begin_of_text, ReadTokenId(file, "tokenizer.ggml.bos_token_id", size));
  HW_ASSIGN_OR_RETURN(spec.end_of_turn, ReadTokenId(file, "tokenizer.ggml.eos_token_id", size));
  HW_ASSIGN_OR_RETURN(spec.unknown, ReadTokenId(file, "tokenizer.ggml.unknown_token_id", size));
  HW_ASSIGN_OR_RETURN(spec.padding, ReadTokenId(file, "tokenizer.ggml.padding_token_id", size));
  HW_ASSIGN_OR_RETURN(spec.adds_begin_of_text, ReadFlag(file, "tokenizer.ggml.add_bos_token"));
  HW_ASSIGN_OR_RETURN(const bool adds_space, ReadFlag(file, "tokenizer.ggml.add_space_prefix"));
  if (adds_space) {
    return absl::UnimplementedError("field 'tokenizer.ggml.add_space_prefix' is true, want false");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenizerSpec> ReadTokenizerSpec(const GgufFile& file) {
  TokenizerSpec spec;
  HW_ASSIGN_OR_RETURN(spec.model, ReadKnown(file, "tokenizer.ggml.model", "gpt2"));
  HW_ASSIGN_OR_RETURN(spec.pre_tokenizer, ReadKnown(file, "tokenizer.ggml.pre", "smollm"));
  HW_RETURN_IF_ERROR(ReadVocabulary(file, spec));
  HW_RETURN_IF_ERROR(ReadSpecialTokens(file, spec));
  if (file.Has("tokenizer.chat_template")) {
    HW_ASSIGN_OR_RETURN(spec.chat_template, file.GetString("tokenizer.chat_template"));
  }
  return spec;
}

}  // namespace heavywater
