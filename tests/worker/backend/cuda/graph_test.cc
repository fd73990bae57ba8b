// A step's operations as a CUDA graph.
#include <cstring>

#include "tests/worker/backend/cuda/slots_case.h"

namespace heavywater::cuda {
namespace {

class GraphTest : public SlotsTest {};

TEST_F(GraphTest, OperationsThatWereCapturedDoTheSameAgainWhenTheGraphIsLaunched) {
  const KvShape shape = Shape(2, 64, KvDtype::kFloat32);
  LayerImage image = EmptyLayer(shape, 1, 6);
  for (int slot = 0; slot < 6; ++slot) image.positions[slot] = slot;
  const DeviceLayer layer(backend(), image);
  TestMemory host(backend(), 2 * shape.row_bytes());
  const DeviceBuffer sums = backend().Allocate(8 * 6).value();
  const DeviceBuffer kept = backend().Allocate(6).value();
  const DeviceBuffer victims = backend().Allocate(4 * 2).value();
  const DeviceBuffer victim_scores = backend().Allocate(8 * 2).value();
  DeviceBuffer rows = Rows(shape, 1, 4);
  Stream stream = backend().NewStream().value();
  ASSERT_TRUE(backend().Synchronize(stream).ok());
  ASSERT_EQ(cudaStreamBeginCapture(HandleOf(stream), cudaStreamCaptureModeThreadLocal),
            cudaSuccess);
  Append(shape, layer.view(), 1, 5, std::move(rows), host.data(), stream);
  ASSERT_TRUE(backend().CollectGains(shape, layer.view(), sums.As<int64_t>(), stream).ok());
  ASSERT_TRUE(backend().AddScores(layer.view(), sums.As<int64_t>(), 1.0, stream).ok());
  ASSERT_TRUE(backend()
                  .Select({.positions = layer.view().positions,
                           .scores = layer.view().scores,
                           .kept = kept.As<uint8_t>(),
                           .num_sets = 1,
                           .stride = 6,
                           .count = 6,
                           .selection = {.budget_tokens = 5,
                                         .sink_tokens = 0,
                                         .recent_tokens = 1,
                                         .tokens_seen = 6}},
                          stream)
                  .ok());
  ASSERT_TRUE(backend()
                  .CollectVictims({.positions = layer.view().positions,
                                   .scores = layer.view().scores,
                                   .kept = kept.As<uint8_t>(),
                                   .victims = victims.As<int32_t>(),
                                   .victim_scores = victim_scores.As<int64_t>(),
                                   .num_sets = 1,
                                   .stride = 6,
                                   .kept_stride = 6,
                                   .used = 6,
                                   .max_victims = 2},
                                  stream)
                  .ok());
  // The last thing that waits for the copies of the append, within the graph.
  ASSERT_TRUE(backend().Zero(sums.As<std::byte>(), stream).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(HandleOf(stream), &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
  EXPECT_EQ(layer.Read(), image) << "captured work ran";

  for (int replay = 1; replay <= 2; ++replay) {
    // Of slot 2 the least.
    const std::vector<int64_t> gains = {5, 6, 1, 7, 8, 0, 5, 6, 1, 7, 8, 0};
    ASSERT_TRUE(backend()
                    .CopyToDevice(DeviceSpan<std::byte>(reinterpret_cast<std::byte*>(
                                                            layer.view().gains.device_address()),
                                                        12 * 8),
                                  std::as_bytes(std::span(gains)), stream)
                    .ok());
    std::memset(host.data(), 0, 2 * shape.row_bytes());
    ASSERT_EQ(cudaGraphLaunch(exec, HandleOf(stream)), cudaSuccess);
    ASSERT_TRUE(backend().Synchronize(stream).ok());
    const LayerImage read = layer.Read();
    EXPECT_EQ(read.scores[3], 14 * replay);
    EXPECT_EQ(read.scores[5], 0);
    EXPECT_EQ(Download<int32_t>(backend(), victims), (std::vector<int32_t>{2, -1}));
    float channel = 0;
    std::memcpy(&channel, host.data() + shape.row_bytes(), sizeof(channel));
    EXPECT_EQ(channel, 4);
  }
  ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace heavywater::cuda
