// A step's work on the device, captured as a CUDA graph: replaying it does what the
// calls did. Needs a GPU.
#include <cuda_runtime.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/backend/layer_image.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {
namespace {

constexpr int kReplays = 3;

KvShape Shape() {
  return {.num_layers = 1,
          .num_query_heads = 8,
          .num_kv_heads = 2,
          .total_kv_heads = 2,
          .total_query_heads = 8,
          .head_dim = 128,
          .dtype = KvDtype::kBFloat16,
          .page_tokens = 256};
}

// Append to the last slot, attend, collect the gains and add them to the scores.
class StepOnDevice {
 public:
  StepOnDevice(Backend& backend, const LayerImage& image, std::mt19937 rng)
      : backend_(backend),
        layer_(backend, image),
        slot_(static_cast<int32_t>(image.used - 1)),
        keys_(Upload(backend, RandomFloats(rng, 2 * 128))),
        values_(Upload(backend, RandomFloats(rng, 2 * 128))),
        queries_(Upload(backend, RandomFloats(rng, 8 * 128))),
        out_(Upload(backend, std::vector<float>(8 * 128))),
        collected_(Upload(backend, std::vector<int64_t>(image.used))),
        scratch_(backend.Allocate(backend.AttendScratchBytes(Shape(), image.capacity)).value()) {
    Stream uploads;
    EXPECT_TRUE(backend.Synchronize(uploads).ok());
  }

  absl::Status Enqueue(Stream& stream) {
    const LayerView& view = layer_.view();
    const AppendItem append = {.layer = view,
                               .first_token = 0,
                               .num_tokens = 1,
                               .first_position = slot_,
                               .slots = {&slot_, 1}};
    const AttendItem attend = {
        .layer = view, .first_token = 0, .num_tokens = 1, .first_position = slot_};
    absl::Status status = backend_.Append(Shape(),
                                          {.items = {&append, 1},
                                           .keys = keys_.As<float>(),
                                           .values = values_.As<float>(),
                                           .host_rows = {}},
                                          stream);
    status.Update(backend_.Attend(Shape(),
                                  {.items = {&attend, 1},
                                   .queries = queries_.As<float>(),
                                   .out = out_.As<float>(),
                                   .scratch = scratch_.As<std::byte>(),
                                   .scale = 1 / std::sqrt(128.0f)},
                                  stream));
    status.Update(backend_.CollectGains(Shape(), view, collected_.As<int64_t>(), stream));
    status.Update(backend_.AddScores(view, collected_.As<const int64_t>(), 0.9, stream));
    return status;
  }

  LayerImage layer() const { return layer_.Read(); }
  std::vector<float> out() const { return Download<float>(backend_, out_); }

 private:
  Backend& backend_;
  DeviceLayer layer_;
  const int32_t slot_;
  DeviceBuffer keys_;
  DeviceBuffer values_;
  DeviceBuffer queries_;
  DeviceBuffer out_;
  DeviceBuffer collected_;
  DeviceBuffer scratch_;
};

TEST(DeviceGraphTest, ACapturedStepReplaysToWhatTheCallsDo) {
  auto created = CreateCudaBackend({});
  if (!created.ok()) GTEST_SKIP() << created.status();
  Backend& backend = **created;
  std::mt19937 rng(1);
  const LayerImage image = DenseLayer(rng, Shape(), 1, 1500);
  StepOnDevice called(backend, image, rng);
  StepOnDevice replayed(backend, image, rng);
  Stream stream = backend.NewStream().value();
  for (int i = 0; i < kReplays; ++i) {
    const absl::Status status = called.Enqueue(stream);
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_TRUE(backend.Synchronize(stream).ok());

  auto* const handle = static_cast<cudaStream_t>(stream.handle);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const absl::Status status = replayed.Enqueue(stream);
  ASSERT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int i = 0; i < kReplays; ++i) ASSERT_EQ(cudaGraphLaunch(exec, handle), cudaSuccess);
  ASSERT_TRUE(backend.Synchronize(stream).ok());

  EXPECT_EQ(replayed.out(), called.out());
  EXPECT_EQ(replayed.layer(), called.layer());
  EXPECT_NE(replayed.layer().scores, image.scores);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace heavywater
