// Bytes that decode attention moves, counted by the shim's loads and stores, against the
// necessary: K and V, the positions, and the gains, which are read and written.
#include <cuda_runtime.h>

#include <random>
#include <string>
#include <vector>

#include "tests/worker/backend/backend_test_base.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/backend/cuda/whole_wave.h"

namespace heavywater {
namespace {

constexpr int kKvHeads = 2;
constexpr int64_t kSlots = 1000;  // of which a block keeps the weights of 16 query heads
constexpr int kGroups[] = {1, 2, 3, 4, 7, 8, 12, 16};

KvShape ShapeOf(int group_size, int head_dim) {
  KvShape shape;
  shape.num_query_heads = group_size * kKvHeads;
  shape.num_kv_heads = kKvHeads;
  shape.head_dim = head_dim;
  shape.dtype = KvDtype::kBFloat16;
  return shape;
}

// One new token of each of some sequences.
AttendCase Step(const KvShape& shape, int sequences) {
  std::mt19937 rng(1);
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0.09f};
  for (int i = 0; i < sequences; ++i) {
    attend.items.push_back({.layer = DenseLayer(rng, shape, 1, kSlots)});
    attend.items.back().num_tokens = 1;
    attend.items.back().first_position = static_cast<Position>(kSlots - 1);
  }
  attend.queries = RandomFloats(rng, int64_t{sequences} * shape.num_query_heads * shape.head_dim);
  return attend;
}

int64_t NecessaryBytes(const KvShape& shape, int sequences) {
  const int64_t of_slot = shape.num_kv_heads * (shape.row_bytes() + 2 * sizeof(int64_t)) +
                          static_cast<int64_t>(sizeof(Position));
  return sequences * kSlots * of_slot;
}

class AttendBytesTest : public testing::Test {
 protected:
  void SetUp() override {
    cuda_shim::SetOptions({});
    backend_ = *CreateCudaBackend({.device = 0});
  }
  int64_t Moved(const AttendCase& attend) {
    cuda_shim::ResetCounters();
    RunAttend(*backend_, attend);
    const cuda_shim::Counters counters = cuda_shim::ReadCounters();
    EXPECT_EQ(counters.host_loaded + counters.host_stored, 0);
    return counters.loaded + counters.stored;
  }
  Backend& backend() { return *backend_; }

 private:
  std::unique_ptr<Backend> backend_;
};

// As many tokens and KV heads as the device has places: their weights stay within the
// blocks.
TEST_F(AttendBytesTest, AStepThatFillsTheDeviceMovesAtMostATenthMoreWhateverTheGroup) {
  cudaDeviceProp device;
  ASSERT_EQ(cudaGetDeviceProperties(&device, 0), cudaSuccess);
  const int sequences = device.multiProcessorCount * cuda::kWholeBlocks / kKvHeads;
  for (const int head_dim : {64, 128}) {
    for (const int group_size : kGroups) {
      const KvShape shape = ShapeOf(group_size, head_dim);
      const auto moved = static_cast<double>(Moved(Step(shape, sequences)));
      const auto necessary = static_cast<double>(NecessaryBytes(shape, sequences));
      const std::string name = std::to_string(group_size) + "_of_" + std::to_string(head_dim);
      EXPECT_GE(moved, necessary) << name;
      // Of 16 heads the splits' outputs, which go to scratch memory and back, are more.
      EXPECT_LE(moved, (group_size < 16 ? 1.1 : 1.12) * necessary) << name;
      RecordProperty("ratio_" + name, std::to_string(moved / necessary));
    }
  }
}

// A token that is split over blocks: a probability is known only when the last split is
// done, so that a weight of each slot and query head goes to scratch memory and back.
// What is more than that is again at most a tenth, and K and V are loaded once.
TEST_F(AttendBytesTest, OneSequenceMovesItsWeightsBesideAndAtMostATenthMore) {
  for (const int group_size : kGroups) {
    const KvShape shape = ShapeOf(group_size, 128);
    const auto moved = static_cast<double>(Moved(Step(shape, 1)));
    const int64_t weights = 2 * kSlots * shape.num_query_heads * sizeof(float);
    const auto necessary = static_cast<double>(NecessaryBytes(shape, 1) + weights);
    EXPECT_GE(moved, necessary) << group_size;
    EXPECT_LE(moved, 1.1 * necessary) << group_size;
    RecordProperty("ratio_" + std::to_string(group_size), std::to_string(moved / necessary));
  }
}

TEST_F(AttendBytesTest, WholeAndSplitTokensGiveTheSameBits) {
  for (const int group_size : kGroups) {
    for (const KvDtype dtype : kKvDtypes) {
      KvShape shape = ShapeOf(group_size, 80);
      shape.dtype = dtype;
      AttendCase batch = Step(shape, 4);
      batch.gains = group_size % 2 == 0 ? GainKind::kPivotal : GainKind::kProbability;
      const AttendOutcome whole = RunAttend(backend(), batch);
      std::vector<float> out;
      for (size_t item = 0; item < batch.items.size(); ++item) {
        AttendCase alone = batch.Alone(item);
        alone.gains = batch.gains;
        const AttendOutcome split = RunAttend(backend(), alone);
        out.insert(out.end(), split.out.begin(), split.out.end());
        EXPECT_EQ(whole.gains[item], split.gains[0]) << "item " << item;
      }
      ExpectSameBits(whole.out, out);
    }
  }
}

}  // namespace
}  // namespace heavywater
