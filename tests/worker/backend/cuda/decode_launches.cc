// Prints what each kernel of a decode step is started with, as JSON lines: name, threads
// of a block, and the most dynamic shared memory that the shapes below ask of it. Together
// with what ptxas says of registers that is its occupancy (deploy/cmake/kernel_table).
#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>

#include "cache_service/base/check.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/recall_image.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {
namespace {

constexpr int kKvHeads = 2;
constexpr int64_t kSlots = 1024;
constexpr int kSequences = 4;  // fill the shim's device

struct Most {
  int threads = 0;
  int64_t shared_bytes = 0;
};

// The new token's rows into the last slot, attention, the scores, the choice.
void RunStep(Backend& backend, const KvShape& shape, const LayerView& layer, int sequences,
             const RecallView* recall) {
  std::mt19937 rng(1);
  const int32_t slot = kSlots - 1;
  const DeviceBuffer rows =
      Upload(backend, RandomFloats(rng, int64_t{sequences} * kKvHeads * shape.head_dim));
  const DeviceBuffer queries = Upload(
      backend, RandomFloats(rng, int64_t{sequences} * shape.num_query_heads * shape.head_dim));
  const DeviceBuffer out = backend.Allocate(queries.bytes()).value();
  const DeviceBuffer sums = backend.Allocate(kSlots * sizeof(int64_t)).value();
  const DeviceBuffer kept = backend.Allocate(kSlots).value();
  const DeviceBuffer victims = backend.Allocate(sizeof(int32_t)).value();
  const DeviceBuffer victim_scores = backend.Allocate(sizeof(int64_t)).value();
  const RecallLimits limits = recall == nullptr ? RecallLimits{} : LimitsOf(*recall);
  const DeviceBuffer scratch =
      backend.Allocate(backend.AttendScratchBytes(shape, kSlots, limits)).value();
  std::vector<AppendItem> appends;
  std::vector<AttendItem> attends;
  for (int i = 0; i < sequences; ++i) {
    appends.push_back({.layer = layer,
                       .first_token = i,
                       .num_tokens = 1,
                       .first_position = slot,
                       .slots = {&slot, 1}});
    attends.push_back({.layer = layer,
                       .first_token = i,
                       .num_tokens = 1,
                       .first_position = slot,
                       .recall = recall});
  }
  Stream stream;
  HW_CHECK(backend
               .Append(shape,
                       {.items = appends,
                        .keys = rows.As<float>(),
                        .values = rows.As<float>(),
                        .host_rows = {}},
                       stream)
               .ok());
  HW_CHECK(backend
               .Attend(shape,
                       {.items = attends,
                        .queries = queries.As<float>(),
                        .out = out.As<float>(),
                        .scratch = scratch.As<std::byte>(),
                        .scale = 0.09f},
                       stream)
               .ok());
  HW_CHECK(backend.CollectGains(shape, layer, sums.As<int64_t>(), stream).ok());
  HW_CHECK(backend.AddScores(layer, sums.As<int64_t>(), 0.9, stream).ok());
  HW_CHECK(backend
               .Select({.positions = layer.positions,
                        .scores = layer.scores,
                        .kept = kept.As<uint8_t>(),
                        .num_sets = 1,
                        .stride = kSlots,
                        .count = kSlots,
                        .selection = {.budget_tokens = kSlots - 1,
                                      .sink_tokens = 0,
                                      .recent_tokens = 1,
                                      .tokens_seen = kSlots}},
                       stream)
               .ok());
  HW_CHECK(backend
               .CollectVictims({.positions = layer.positions,
                                .scores = layer.scores,
                                .kept = kept.As<uint8_t>(),
                                .victims = victims.As<int32_t>(),
                                .victim_scores = victim_scores.As<int64_t>(),
                                .num_sets = 1,
                                .stride = kSlots,
                                .kept_stride = kSlots,
                                .used = kSlots,
                                .max_victims = 1},
                               stream)
               .ok());
  HW_CHECK(backend.Synchronize(stream).ok());
}

void RunShape(Backend& backend, const KvShape& shape, std::map<std::string, Most>& kernels) {
  std::mt19937 rng(1);
  const LayerImage image = DenseLayer(rng, shape, 1, kSlots);
  RecallImage recalled = RecallOf(shape, image, DefaultSketchChannels(shape.head_dim));
  for (Position position = 0; position < kSlots / 2; ++position) {
    SetDemoted(recalled, 0, position, true);
  }
  const DeviceRecall recall(backend, shape, recalled, 1);
  const DeviceLayer layer(backend, image);
  cuda_shim::SetOptions({.on_launch = [&kernels](const cuda_shim::LaunchRecord& launch) {
    Most& most = kernels[launch.kernel];
    most.threads = std::max(most.threads, launch.threads);
    most.shared_bytes = std::max(most.shared_bytes, launch.shared_bytes);
  }});
  RunStep(backend, shape, layer.view(), 1, &recall.view());
  RunStep(backend, shape, layer.view(), kSequences, nullptr);
  cuda_shim::SetOptions({});
}

int Main() {
  const std::unique_ptr<Backend> backend = CreateCudaBackend({}).value();
  std::map<std::string, Most> kernels;
  for (const KvDtype dtype : {KvDtype::kBFloat16, KvDtype::kFloat16}) {
    for (const int head_dim : {64, 128, 256}) {  // 80 and 96 run as 128
      for (const int group_size : {1, 2, 4, 8, 16}) {
        KvShape shape;
        shape.num_query_heads = group_size * kKvHeads;
        shape.num_kv_heads = kKvHeads;
        shape.head_dim = head_dim;
        shape.dtype = dtype;
        RunShape(*backend, shape, kernels);
      }
    }
  }
  for (const auto& [name, most] : kernels) {
    std::printf("{\"kernel\":\"%s\",\"threads\":%d,\"shared_bytes\":%lld}\n", name.c_str(),
                most.threads, static_cast<long long>(most.shared_bytes));
  }
  return 0;
}

}  // namespace
}  // namespace heavywater

int main() { return heavywater::Main(); }
