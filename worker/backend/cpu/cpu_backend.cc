#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/cpu/decode_attention.h"
#include "worker/backend/cpu/prompt_attention.h"
#include "worker/backend/cpu/select.h"
#include "worker/backend/cpu/target.h"
#include "worker/backend/cpu/thread_pool.h"
#include "worker/backend/host_memory.h"

namespace heavywater {
namespace {

class CpuBackend final : public HostMemoryBackend {
 public:
  CpuBackend(CpuTarget target, int num_threads)
      : target_(target), pool_(num_threads), decode_(target, pool_), prompt_(target, pool_) {}

  std::string Name() const override { return "cpu-" + std::string(CpuTargetName(target_)); }
  bool CanRest() const override { return true; }

  int64_t AttendScratchBytes(const KvShape& shape, int64_t capacity,
                             const RecallLimits& recall) const override {
    return decode_.ScratchBytes(shape, capacity, recall);
  }
  int64_t PromptScratchBytes(const KvShape& shape, int64_t num_keys) const override {
    return prompt_.ScratchBytes(shape, num_keys);
  }

  absl::Status Attend(const KvShape& shape, const AttendParams& params, Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckBackendShape(shape));
    decode_.Attend(shape, params);
    return absl::OkStatus();
  }

  absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params,
                            Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckBackendShape(shape));
    prompt_.Attend(shape, params);
    return absl::OkStatus();
  }

  absl::Status Select(const SelectParams& params, Stream& stream) override {
    const auto count = static_cast<size_t>(params.count);
    for (int set = 0; set < params.num_sets; ++set) {
      const Candidates candidates{
          .positions = {params.positions.device_address() + set * params.stride, count},
          .scores = {params.scores.device_address() + set * params.stride, count}};
      selector_.Select(candidates, params.selection,
                       {params.kept.device_address() + set * params.count, count});
    }
    return absl::OkStatus();
  }

 private:
  const CpuTarget target_;
  ThreadPool pool_;
  DecodeAttention decode_;
  CpuPromptAttention prompt_;
  SlotSelector selector_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (options.num_threads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads is ", options.num_threads, ", want at least 1"));
  }
  HW_ASSIGN_OR_RETURN(const CpuTarget target, ChooseCpuTarget(options.target));
  return std::make_unique<CpuBackend>(target, options.num_threads);
}

}  // namespace heavywater
