#include "worker/backend/cuda/attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/attend.h"
#include "worker/backend/cuda/attend_sizes.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/prompt_pass.h"
#include "worker/backend/host_memory.h"
#include "worker/backend/pivotal.h"

namespace heavywater::cuda {
namespace {

WaveNeeds NeedsOfBatch(const AttendParams& params) {
  int64_t used = 0;
  RecallLimits recall;
  for (const AttendItem& item : params.items) {
    used = std::max(used, item.layer.used);
    if (item.recall != nullptr) recall.Raise(LimitsOf(*item.recall));
  }
  return NeedsOf(used, recall);
}

WaveToken TokenOf(const KvShape& shape, const AttendParams& params, int32_t index, int64_t token) {
  const AttendItem& item = params.items[index];
  const LayerView& layer = item.layer;
  HW_CHECK(layer.used <= layer.capacity &&
           layer.used <= std::numeric_limits<int32_t>::max() - kSplitSlots);
  const int64_t row =
      (item.first_token + token) * shape.num_query_heads * static_cast<int64_t>(shape.head_dim);
  return {.keys = layer.keys.device_address(),
          .values = layer.values.device_address(),
          .positions = layer.positions.device_address(),
          .gains = item.accumulate_gains ? layer.gains.device_address() : nullptr,
          .queries = params.queries.device_address() + row,
          .out = params.out.device_address() + row,
          .pivotal =
              item.gains == GainKind::kPivotal ? PivotalThreshold(item.first_position + token) : 0,
          .capacity = layer.capacity,
          .used = static_cast<int32_t>(layer.used),
          .num_sets = layer.num_sets,
          .position = static_cast<int32_t>(item.first_position + token),
          .recall = item.recall == nullptr ? -1 : index,
          .item = index,
          .token = static_cast<int32_t>(token)};
}

std::vector<WaveToken> TokensOfBatch(const KvShape& shape, const AttendParams& params) {
  std::vector<WaveToken> tokens;
  for (size_t index = 0; index < params.items.size(); ++index) {
    for (int64_t token = 0; token < params.items[index].num_tokens; ++token) {
      tokens.push_back(TokenOf(shape, params, static_cast<int32_t>(index), token));
    }
  }
  return tokens;
}

bool Recalls(std::span<const WaveToken> wave) {
  return std::any_of(wave.begin(), wave.end(),
                     [](const WaveToken& token) { return token.recall >= 0; });
}

// Tokens [first, first + num_tokens) of the chunk.
PromptPass PassOf(const KvShape& shape, const PromptParams& params, int64_t first,
                  int64_t num_tokens) {
  const int64_t row = first * shape.num_query_heads * static_cast<int64_t>(shape.head_dim);
  return {.keys = params.layer.keys.device_address(),
          .values = params.layer.values.device_address(),
          .gains = params.layer.gains.device_address(),
          .queries = params.queries.device_address() + row,
          .out = params.out.device_address() + row,
          .totals = reinterpret_cast<SplitSum*>(params.scratch.device_address()),
          .capacity = params.layer.capacity,
          .num_query_heads = shape.num_query_heads,
          .num_kv_heads = shape.num_kv_heads,
          .head_dim = shape.head_dim,
          .num_tokens = static_cast<int32_t>(num_tokens),
          .first_position = static_cast<int32_t>(params.first_position + first),
          .score_from = params.score_from,
          .scale = params.scale,
          .pivotal_margin = params.gains == GainKind::kPivotal ? kPivotalMargin : 0};
}

DeviceLimits LimitsOf(const cudaDeviceProp& device) {
  return {.multiprocessors = device.multiProcessorCount,
          .shared_bytes = static_cast<int64_t>(device.sharedMemPerMultiprocessor),
          .block_shared_bytes = static_cast<int64_t>(device.sharedMemPerBlockOptin)};
}

}  // namespace

CudaAttention::CudaAttention(CudaContext& context)
    : context_(context), recall_(context), limits_(LimitsOf(context.properties())) {}

absl::Status CheckCudaShape(const KvShape& shape) {
  HW_RETURN_IF_ERROR(CheckBackendShape(shape));
  if (shape.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", shape.head_dim, ", want at most ", kMaxHeadDim));
  }
  return absl::OkStatus();
}

absl::Status CudaAttention::Attend(const KvShape& shape, const AttendParams& params,
                                   cudaStream_t stream) {
  HW_RETURN_IF_ERROR(CheckCudaShape(shape));
  const std::vector<WaveToken> tokens = TokensOfBatch(shape, params);
  if (tokens.empty()) return absl::OkStatus();
  const WaveNeeds needs = NeedsOfBatch(params);
  const int64_t wave_tokens = WaveTokens(shape, needs, params.scratch.size());
  HW_CHECK(wave_tokens > 0);  // the caller asked AttendScratchBytes()
  const WaveScratch scratch =
      CutWaveScratch(shape, needs, wave_tokens, params.scratch.device_address());
  std::byte* const recall_memory =
      RecallMemoryOf(shape, needs, wave_tokens, params.scratch.device_address());
  for (size_t first = 0; first < tokens.size(); first += wave_tokens) {
    if (first > 0) HW_RETURN_IF_ERROR(context_.RestartOperation(stream));
    const std::span<const WaveToken> wave =
        std::span(tokens).subspan(first, std::min<size_t>(wave_tokens, tokens.size() - first));
    if (Recalls(wave)) {
      HW_RETURN_IF_ERROR(
          recall_.Begin(shape, params.items, wave, needs.recall, recall_memory, stream));
    }
    HW_ASSIGN_OR_RETURN(const WaveToken* const on_device, context_.Upload(wave));
    HW_RETURN_IF_ERROR(AttendWave(shape, params.scale, wave, on_device, scratch, stream));
  }
  return absl::OkStatus();
}

absl::Status CudaAttention::AttendWave(const KvShape& shape, float scale,
                                       std::span<const WaveToken> host, const WaveToken* tokens,
                                       const WaveScratch& scratch, cudaStream_t stream) {
  const WaveShape wave = {.num_tokens = static_cast<int32_t>(host.size()),
                          .num_query_heads = shape.num_query_heads,
                          .num_kv_heads = shape.num_kv_heads,
                          .head_dim = shape.head_dim,
                          .page_tokens = shape.page_tokens,
                          .scale = scale};
  const RecallStep recall = {
      .dtype = shape.dtype, .shape = wave, .host = host, .tokens = tokens, .scratch = scratch};
  const int64_t whole = WholeWaveSharedBytes(wave, host, limits_);
  if (whole > 0) {
    HW_RETURN_IF_CUDA_ERROR(LaunchAttendWhole(shape.dtype, wave, tokens, scratch, whole, stream));
    return HW_CUDA_STATUS(LaunchMerge(wave, tokens, scratch, stream));
  }
  HW_RETURN_IF_CUDA_ERROR(LaunchAttendSplits(shape.dtype, wave, tokens, scratch, stream));
  if (Recalls(host)) {
    HW_RETURN_IF_CUDA_ERROR(LaunchSlotTotals(wave, tokens, scratch, stream));
    HW_RETURN_IF_ERROR(recall_.Pick(recall, stream));
  }
  HW_RETURN_IF_CUDA_ERROR(LaunchMerge(wave, tokens, scratch, stream));
  HW_RETURN_IF_CUDA_ERROR(LaunchAddGains(wave, tokens, scratch, stream));
  return Recalls(host) ? recall_.Report(recall, stream) : absl::OkStatus();
}

absl::Status CudaAttention::AttendPrompt(const KvShape& shape, const PromptParams& params,
                                         cudaStream_t stream) {
  HW_RETURN_IF_ERROR(CheckCudaShape(shape));
  const int64_t num_keys = params.first_position + params.num_tokens;
  HW_CHECK(num_keys <= params.layer.capacity && num_keys <= std::numeric_limits<int32_t>::max());
  HW_CHECK(params.scratch.size() >= CudaPromptScratchBytes(shape, num_keys));
  for (int64_t first = 0; first < params.num_tokens; first += kPromptTokens) {
    const int64_t num_tokens = std::min(params.num_tokens - first, kPromptTokens);
    const PromptPass pass = PassOf(shape, params, first, num_tokens);
    HW_RETURN_IF_CUDA_ERROR(LaunchPromptAttend(shape.dtype, pass, stream));
    HW_RETURN_IF_CUDA_ERROR(LaunchPromptGains(shape.dtype, pass, stream));
  }
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
