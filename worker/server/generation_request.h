// A request for text, checked once at the edge.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "heavywater/v1/generation.pb.h"
#include "worker/cache/kv_layout.h"
#include "worker/model/sampler.h"
#include "worker/model/tokenizer.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Whether its prompt may begin with stored pages of others, and others' with its own.
struct PrefixReuse {
  bool offered = false;       // it is known to the cache service as one that others may begin with
  int64_t max_tokens = 0;     // of the prompt, that may come from stored pages: whole ones
  std::string why_none = {};  // where that is 0
};

struct GenerationRequest {
  std::vector<int32_t> prompt;  // at least one
  std::vector<int32_t> suffix;  // appended once the prompt is compressed
  SequenceOptions sequence;     // every field set
  Budget budget;                // what its policy resolves to
  PrefixReuse prefix;
  SamplerOptions sampling;
  int max_new_tokens = 1;
  bool ignore_eos = false;
  std::vector<int32_t> forced;  // empty, or max_new_tokens of them
  bool return_logits = false;
  bool return_reads = false;  // recall is on
  bool turn = false;          // of a sequence that was opened for another request
  // Of a turn: how long its sequence was to be kept; the past where it was not suspended.
  absl::Time suspended_until = absl::InfinitePast();
  bool is_back = false;            // continues a stream that broke off
  SequenceId resume_sequence = 0;  // 0: begins at its prompt
  std::vector<int32_t> received;   // new tokens that the client has: not told again
  std::string request_id;
  std::string tenant = "default";
};

// What a request is checked against.
struct GenerationLimits {
  const Tokenizer& tokenizer;
  int64_t context_tokens = 0;
  int vocab_size = 0;
  KvShape shape = {};  // of a rank: budgets by device_ratio follow from it
  OnHostFull on_host_full = OnHostFull::kStop;
  std::string default_policy = "snapkv_h2o";  // of requests that name none
  bool prefix_reuse = false;                  // likewise
  std::string no_prefix_reuse = {};           // why it is not possible here; empty: it is
};

// The suffix of a request, from its text or ids. INVALID_ARGUMENT naming the field.
absl::StatusOr<std::vector<int32_t>> ParseSuffix(const v1::GenerateRequest& proto,
                                                 const GenerationLimits& limits);

// INVALID_ARGUMENT naming the field, what came and what was wanted;
// OUT_OF_RANGE when prompt and new tokens exceed the context (at cache-relative
// positions INVALID_ARGUMENT when the prompt or the budget does).
absl::StatusOr<GenerationRequest> ParseGenerateRequest(const v1::GenerateRequest& proto,
                                                       const GenerationLimits& limits);

}  // namespace heavywater
