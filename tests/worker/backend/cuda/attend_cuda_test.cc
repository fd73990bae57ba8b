// What is particular to attention of the CUDA backend: bytes moved, waves, capture.
#include <cuda_runtime.h>

#include <cmath>

#include "tests/worker/backend/backend_test_base.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {
namespace {

class AttendCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    cuda_shim::SetOptions({});
    backend_ = *CreateCudaBackend({.device = 0});
  }
  Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_;
};

// A quarter of the query heads of Llama-3-8B over as much of its KV heads.
KvShape QuarterOfLlama() {
  KvShape shape;
  shape.num_query_heads = 8;
  shape.num_kv_heads = 2;
  shape.head_dim = 128;
  shape.dtype = KvDtype::kBFloat16;
  return shape;
}

AttendCase DenseCase(const KvShape& shape, int64_t length, int64_t num_tokens) {
  std::mt19937 rng(1);
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0.09f};
  attend.items.push_back({.layer = DenseLayer(rng, shape, 1, length)});
  attend.items[0].num_tokens = num_tokens;
  attend.items[0].first_position = static_cast<Position>(length - num_tokens);
  attend.queries = RandomFloats(rng, num_tokens * shape.num_query_heads * shape.head_dim);
  return attend;
}

TEST_F(AttendCudaTest, MovesLessThanATenthMoreThanKvPositionsAndGains) {
  const KvShape shape = QuarterOfLlama();
  for (const int64_t length : {2048, 8192}) {
    const AttendCase attend = DenseCase(shape, length, 1);
    cuda_shim::ResetCounters();
    RunAttend(backend(), attend);
    const cuda_shim::Counters counters = cuda_shim::ReadCounters();
    const int64_t moved = counters.loaded + counters.stored;
    const int64_t kv = length * shape.num_kv_heads * shape.row_bytes();
    // Gains are read and written, positions read once for all heads.
    const int64_t gains = 2 * length * shape.num_kv_heads * static_cast<int64_t>(sizeof(int64_t));
    const int64_t needed = kv + gains + length * static_cast<int64_t>(sizeof(Position));
    EXPECT_GE(moved, needed) << length;
    EXPECT_LE(static_cast<double>(moved), 1.1 * static_cast<double>(needed)) << length;
    RecordProperty("ratio_at_" + std::to_string(length),
                   std::to_string(static_cast<double>(moved) / static_cast<double>(needed)));
  }
}

TEST_F(AttendCudaTest, KAndVAreReadOnceWhateverTheGroup) {
  KvShape shape = QuarterOfLlama();
  std::vector<int64_t> loaded;
  for (const int group_size : {1, 8}) {
    shape.num_query_heads = group_size * shape.num_kv_heads;
    const AttendCase attend = DenseCase(shape, 2048, 1);
    cuda_shim::ResetCounters();
    RunAttend(backend(), attend);
    loaded.push_back(cuda_shim::ReadCounters().loaded);
  }
  const int64_t kv = 2048 * shape.num_kv_heads * shape.row_bytes();
  EXPECT_LT(loaded[1] - loaded[0], kv / 4);
}

TEST_F(AttendCudaTest, ABatchOfSeveralWavesEqualsItsTokensAloneBitForBit) {
  KvShape shape;
  shape.num_query_heads = 2;
  shape.num_kv_heads = 1;
  shape.head_dim = 64;
  shape.dtype = KvDtype::kFloat32;
  const int64_t num_tokens = 300;  // of 128 a wave
  const AttendCase batch = DenseCase(shape, 600, num_tokens);
  const AttendOutcome together = RunAttend(backend(), batch);
  const int64_t row = int64_t{shape.num_query_heads} * shape.head_dim;
  for (const int64_t token : {0, 127, 128, 255, 256, 299}) {
    AttendCase alone = batch;
    alone.items[0].num_tokens = 1;
    alone.items[0].first_position = static_cast<Position>(batch.items[0].first_position + token);
    alone.queries.assign(batch.queries.begin() + token * row,
                         batch.queries.begin() + (token + 1) * row);
    ExpectSameBits({together.out.begin() + token * row, together.out.begin() + (token + 1) * row},
                   RunAttend(backend(), alone).out);
  }
}

TEST_F(AttendCudaTest, ALongPromptRunsInPiecesThatEqualItsChunksBitForBit) {
  KvShape shape;
  shape.num_query_heads = 1;
  shape.num_kv_heads = 1;
  shape.head_dim = 8;
  shape.dtype = KvDtype::kFloat32;
  std::mt19937 rng(2);
  const int64_t length = 4200;  // of 4096 a piece
  PromptCase prompt = RandomPromptCase(rng, shape, length);
  prompt.score_from = 4080;  // in both pieces
  const AttendOutcome whole = RunPrompt(backend(), prompt);
  prompt.chunks = {2100, 2100};
  const AttendOutcome chunked = RunPrompt(backend(), prompt);
  ExpectSameBits(whole.out, chunked.out);
  EXPECT_EQ(whole.gains, chunked.gains);
}

TEST_F(AttendCudaTest, ACapturedStepAttendsAgainWheneverItIsLaunched) {
  const KvShape shape = QuarterOfLlama();
  const AttendCase attend = DenseCase(shape, 700, 1);
  const AttendOutcome once = RunAttend(backend(), attend);

  const DeviceLayer layer(backend(), attend.items[0].layer);
  const DeviceBuffer queries = Upload(backend(), attend.queries);
  const DeviceBuffer out = Upload(backend(), std::vector<float>(attend.queries.size(), NAN));
  const AttendItem item{.layer = layer.view(), .num_tokens = 1, .first_position = 699};
  const DeviceBuffer scratch = AttendScratch(backend(), shape, {&item, 1});
  Stream stream = *backend().NewStream();
  auto* handle = static_cast<cudaStream_t>(stream.handle);
  ASSERT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_TRUE(backend()
                  .Attend(shape,
                          {.items = {&item, 1},
                           .queries = queries.As<float>(),
                           .out = out.As<float>(),
                           .scratch = scratch.As<std::byte>(),
                           .scale = attend.scale},
                          stream)
                  .ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  EXPECT_TRUE(std::isnan(Download<float>(backend(), out)[0]));

  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
  for (int launch = 1; launch <= 2; ++launch) {
    ASSERT_EQ(cudaGraphLaunch(executable, handle), cudaSuccess);
    ASSERT_TRUE(backend().Synchronize(stream).ok());
    ExpectSameBits(Download<float>(backend(), out), once.out);
    std::vector<int64_t> gains = once.gains[0];
    for (int64_t& gain : gains) gain *= launch;
    EXPECT_EQ(layer.Read().gains, gains);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace heavywater
