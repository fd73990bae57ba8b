// The tokenizer of a Transformers folder: tokenizer.json, and beside it what
// tokenizer_config.json, generation_config.json and chat_template.jinja add.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

// The vocabulary and how texts are cut, of tokenizer.json alone: byte-level BPE with one of
// the patterns of pre_tokenizer.h, or BPE of characters with byte fallback as Llama 2 and
// Mistral have it. UNIMPLEMENTED for what would change tokens and is not computed, naming
// it and what is supported; INVALID_ARGUMENT for what contradicts itself.
absl::StatusOr<TokenizerSpec> ParseTokenizerJson(const nlohmann::json& json);

// All of it. NOT_FOUND without tokenizer.json; errors as above with the path.
absl::StatusOr<TokenizerSpec> ReadTokenizerFolder(const std::string& folder);

}  // namespace heavywater
