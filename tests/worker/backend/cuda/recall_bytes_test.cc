// What recall moves, counted by the shim: the scan reads sketches and little else, and
// of the host's memory only the rows that were picked are read, once for all heads.
#include <algorithm>
#include <cmath>

#include "tests/worker/backend/cuda/slots_case.h"
#include "tests/worker/backend/recall_image.h"
#include "worker/backend/cuda/recall_wave.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kPositions = 20 * 256;
constexpr int kQueryHeads = 8;
constexpr float kScale = 0.088f;

class RecallBytesTest : public SlotsTest {
 protected:
  // Four query heads for each KV head. All positions are demoted but the last page's.
  RecallBytesTest() {
    shape_.num_query_heads = kQueryHeads;
    std::mt19937 rng(1);
    full_ = DenseLayer(rng, shape_, 1, kPositions);
    image_ = RecallOf(shape_, full_, DefaultSketchChannels(shape_.head_dim));
    for (Position position = 0; position < kPositions - shape_.page_tokens; ++position) {
      SetDemoted(image_, 0, position, true);
      full_.positions[position] = kNoPosition;
    }
    queries_ = Upload(backend(), RandomFloats(rng, kQueryHeads * shape_.head_dim));
  }

  cuda_shim::Counters Take() {
    Stream stream;
    EXPECT_TRUE(backend().Synchronize(stream).ok());
    const cuda_shim::Counters counters = cuda_shim::ReadCounters();
    cuda_shim::ResetCounters();
    return counters;
  }

  KvShape shape_ = Shape(2, 128, KvDtype::kBFloat16);
  LayerImage full_;
  RecallImage image_;
  DeviceBuffer queries_;
};

TEST_F(RecallBytesTest, TheScanReadsSketchesOfDemotedPagesItsTablesAndAtMostATenthMore) {
  const DeviceRecall recall(backend(), shape_, image_, 1);
  const RecallView& view = recall.view();
  std::vector<const std::byte*> pages;
  for (const DeviceSpan<std::byte>& page : view.pages) pages.push_back(page.device_address());
  const DeviceBuffer sketches = Upload(backend(), pages);
  const DeviceBuffer host = Upload(
      backend(), std::vector<const std::byte*>(view.host.pages.begin(), view.host.pages.end()));
  RecallItem item = {};
  item.sketches = sketches.As<const unsigned char*>().device_address();
  item.host = host.As<const unsigned char*>().device_address();
  item.channels = view.channels.device_address();
  item.demoted = view.demoted.device_address();
  item.num_pages = static_cast<int32_t>(view.num_pages);
  item.num_channels = view.sketch.channels;
  item.page_bytes = static_cast<int32_t>(view.sketch.page_bytes());
  item.max_picks = 64;
  item.min_share = 1e-4f;
  item.parts = ScanParts(view.num_pages);
  WaveToken token = {};
  token.queries = queries_.As<float>().device_address();
  token.num_sets = 1;
  const DeviceBuffer items = Upload(backend(), std::vector<RecallItem>{item});
  const DeviceBuffer tokens = Upload(backend(), std::vector<WaveToken>{token});
  // So large a sum that few positions are candidates, as in a trained model.
  const DeviceBuffer totals = Upload(
      backend(), std::vector<SplitSum>(kQueryHeads, {.sum = 1e4, .maximum = 2, .unused = 0}));
  const RecallLimits limits{.max_picks = item.max_picks};
  const DeviceBuffer memory = backend().Allocate(RecallScratchBytes(shape_, limits, 1)).value();
  RecallWave wave = {};
  wave.items = items.As<RecallItem>().device_address();
  wave.scratch = CutRecallScratch(shape_, limits, 1, memory.As<std::byte>().device_address());
  wave.num_channels = item.num_channels;
  wave.parts = item.parts;
  wave.max_picks = item.max_picks;
  WaveScratch scratch = {};
  scratch.totals = totals.As<SplitSum>().device_address();
  const WaveShape shape = {.num_tokens = 1,
                           .num_query_heads = kQueryHeads,
                           .num_kv_heads = shape_.num_kv_heads,
                           .head_dim = shape_.head_dim,
                           .page_tokens = shape_.page_tokens,
                           .scale = kScale};
  Take();
  ASSERT_EQ(LaunchScan(shape, tokens.As<WaveToken>().device_address(), scratch, wave, nullptr),
            cudaSuccess);
  const cuda_shim::Counters moved = Take();
  // Padding between pages need not be read.
  const int64_t pages_read = (view.num_pages - 1) * shape_.num_kv_heads;
  const int64_t tables = view.sketch.means_offset() + 2 * (shape_.head_dim - view.sketch.channels);
  EXPECT_GE(moved.loaded, pages_read * tables);
  // Every part has its group's queries and its channels; every page two addresses and
  // its set's words.
  const int64_t of_part =
      kQueryHeads / shape_.num_kv_heads * shape_.head_dim * 4 + view.sketch.channels;
  const int64_t of_page = 2 * 8 + shape_.page_tokens / 8;
  const int64_t necessary = pages_read * view.sketch.page_bytes() +
                            shape_.num_kv_heads * (item.parts * of_part + view.num_pages * of_page);
  EXPECT_LE(moved.loaded, necessary + necessary / 10);
  EXPECT_EQ(moved.host_loaded, 0);
}

TEST_F(RecallBytesTest, ExactlyThePickedRowsAreReadFromHostMemory) {
  for (const int64_t max_picks : {7, 64, 150}) {
    image_.max_picks = max_picks;
    image_.min_share = 0;
    const DeviceRecall recall(backend(), shape_, image_, 1);
    const DeviceLayer layer(backend(), full_);
    const AttendItem item{.layer = layer.view(),
                          .first_token = 0,
                          .num_tokens = 1,
                          .first_position = kPositions - 1,
                          .recall = &recall.view()};
    const DeviceBuffer out = backend().Allocate(queries_.bytes()).value();
    const DeviceBuffer scratch =
        backend()
            .Allocate(backend().AttendScratchBytes(shape_, kPositions, LimitsOf(recall.view())))
            .value();
    Stream stream;
    Take();
    ASSERT_TRUE(backend()
                    .Attend(shape_,
                            {.items = {&item, 1},
                             .queries = queries_.As<float>(),
                             .out = out.As<float>(),
                             .scratch = scratch.As<std::byte>(),
                             .scale = kScale},
                            stream)
                    .ok());
    const cuda_shim::Counters moved = Take();
    int64_t picks = 0;
    for (const auto& of_head : recall.Read().picks) picks += static_cast<int64_t>(of_head.size());
    EXPECT_EQ(picks, shape_.num_kv_heads * max_picks);
    EXPECT_EQ(moved.host_loaded, picks * shape_.row_bytes());
    // Positions and gains; for each KV head their number and the missing share.
    EXPECT_EQ(moved.host_stored, picks * (4 + 8) + shape_.num_kv_heads * (4 + 4));
  }
}

// A fifth of the positions resident, as the tuned preset has them. Necessary: K, V,
// positions and gains of the residents, the sketches of the others, the picked rows and
// their report, and the weights of a token that is split (attend_bytes_test.cc).
TEST_F(RecallBytesTest, AStepWithRecallMovesAtMostATenthMoreThanItMust) {
  constexpr int64_t kSeen = 60 * 256;
  constexpr int64_t kResident = kSeen / 5;
  std::mt19937 rng(2);
  const LayerImage full = DenseLayer(rng, shape_, 1, kSeen);
  for (const int group_size : {1, 4, 8}) {
    shape_.num_query_heads = group_size * shape_.num_kv_heads;
    RecallImage image = RecallOf(shape_, full, DefaultSketchChannels(shape_.head_dim));
    for (Position position = 0; position < kSeen - kResident; ++position) {
      SetDemoted(image, 0, position, true);
    }
    image.max_picks = 64;
    image.min_share = 1e-4f;
    LayerImage residents = DenseLayer(rng, shape_, 1, kResident);
    std::iota(residents.positions.begin(), residents.positions.end(), kSeen - kResident);
    const DeviceRecall recall(backend(), shape_, image, 1);
    RecallView view = recall.view();
    view.missing = {};  // a second scan, at plans only
    const DeviceLayer layer(backend(), residents);
    const AttendItem item{.layer = layer.view(),
                          .first_token = 0,
                          .num_tokens = 1,
                          .first_position = kSeen - 1,
                          .recall = &view};
    const DeviceBuffer queries =
        Upload(backend(), RandomFloats(rng, int64_t{shape_.num_query_heads} * shape_.head_dim));
    const DeviceBuffer out = backend().Allocate(queries.bytes()).value();
    const DeviceBuffer scratch =
        backend().Allocate(backend().AttendScratchBytes(shape_, kResident, LimitsOf(view))).value();
    Stream stream;
    Take();
    ASSERT_TRUE(backend()
                    .Attend(shape_,
                            {.items = {&item, 1},
                             .queries = queries.As<float>(),
                             .out = out.As<float>(),
                             .scratch = scratch.As<std::byte>(),
                             .scale = kScale},
                            stream)
                    .ok());
    const cuda_shim::Counters moved = Take();
    int64_t picks = 0;
    for (const auto& of_head : recall.Read().picks) picks += static_cast<int64_t>(of_head.size());
    EXPECT_GT(picks, 0);
    const int64_t of_slot =
        shape_.num_kv_heads * (shape_.row_bytes() + 2 * 8) + 4 + 2 * shape_.num_query_heads * 4;
    const int64_t pages = (kSeen - kResident) / shape_.page_tokens * shape_.num_kv_heads;
    const double necessary =
        static_cast<double>(kResident * of_slot + pages * view.sketch.page_bytes() +
                            picks * (shape_.row_bytes() + 4 + 8));
    const double all =
        static_cast<double>(moved.loaded + moved.stored + moved.host_loaded + moved.host_stored);
    EXPECT_LE(all, 1.1 * necessary) << group_size;
    RecordProperty("ratio_" + std::to_string(group_size), std::to_string(all / necessary));
  }
}

}  // namespace
}  // namespace heavywater::cuda
