// What GetModel says, cut into messages.
#pragma once

#include <string>
#include <vector>

#include "heavywater/v1/common.pb.h"
#include "heavywater/v1/generation.pb.h"
#include "worker/cache/kv_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

inline constexpr int32_t kPageFormatVersion = 1;

// The layout of KV that a model, a dtype and a page size give.
v1::Fingerprint MakeFingerprint(const ModelConfig& config, const std::string& content_hash,
                                const KvShape& shape);

v1::ModelInfo MakeModelInfo(const ModelConfig& config, const TokenizerSpec& tokenizer,
                            const v1::Fingerprint& fingerprint, int tensor_parallel,
                            const std::string& default_policy);

// The stream of GetModel: ModelInfo first, then pieces and merges in order, no
// message above about a mebibyte.
std::vector<v1::GetModelResponse> MakeModelMessages(const v1::ModelInfo& info,
                                                    const TokenizerSpec& tokenizer);

}  // namespace heavywater
