#include "worker/cache/kv_layout.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

KvShape Shape() {
  KvShape shape;
  shape.num_layers = 2;
  shape.num_query_heads = 8;
  shape.num_kv_heads = 2;
  shape.total_kv_heads = 2;
  shape.total_query_heads = 8;
  shape.head_dim = 64;
  shape.dtype = KvDtype::kBFloat16;
  return shape;
}

TEST(KvLayoutTest, DtypesHaveNamesAndSizes) {
  EXPECT_EQ(*ParseKvDtype("fp32"), KvDtype::kFloat32);
  EXPECT_EQ(*ParseKvDtype("bf16"), KvDtype::kBFloat16);
  EXPECT_EQ(KvDtypeName(KvDtype::kBFloat16), "bf16");
  EXPECT_EQ(ElementBytes(KvDtype::kFloat32), 4);
  EXPECT_EQ(*ParseKvDtype("fp16"), KvDtype::kFloat16);
  EXPECT_EQ(KvDtypeName(KvDtype::kFloat16), "fp16");
  EXPECT_EQ(ElementBytes(KvDtype::kFloat16), 2);
  EXPECT_THAT(std::string(ParseKvDtype("fp8").status().message()), HasSubstr("fp32, bf16, fp16"));
}

// CASES A8: KV is stored per KV head, never repeated for query heads.
TEST(KvLayoutTest, CaseA8BytesCountKvHeadsAndNotQueryHeads) {
  const LayerBytes bytes = DeviceLayerBytes(Shape(), /*num_sets=*/1, /*capacity=*/16);
  EXPECT_EQ(bytes.slots, 2 * 2 * 16 * 64 * 2);  // K and V, heads, slots, elements, bytes
  EXPECT_EQ(bytes.scores, 16 * 8 + 2 * 16 * 8);
  EXPECT_EQ(bytes.tables, 16 * 4);
  EXPECT_EQ(bytes.total(), bytes.slots + bytes.scores + bytes.tables);
}

TEST(KvLayoutTest, ASetForEachKvHeadHasItsOwnScoresAndPositions) {
  const LayerBytes bytes = DeviceLayerBytes(Shape(), /*num_sets=*/2, /*capacity=*/16);
  EXPECT_EQ(bytes.scores, 2 * 16 * 8 + 2 * 16 * 8);
  EXPECT_EQ(bytes.tables, 2 * 16 * 4);
}

TEST(KvLayoutTest, AFullCacheHasWholePagesOfKeysAndValuesAlone) {
  const int64_t page = 2 * 2 * 256 * 2 * 64 * 2;  // layers, heads, positions, K and V, elements
  EXPECT_EQ(FullCacheBytes(Shape(), 0), 0);
  EXPECT_EQ(FullCacheBytes(Shape(), 1), page);
  EXPECT_EQ(FullCacheBytes(Shape(), 256), page);
  EXPECT_EQ(FullCacheBytes(Shape(), 257), 2 * page);
}

TEST(KvLayoutTest, ValidationNamesTheField) {
  struct Row {
    void (*change)(KvShape&);
    const char* error;
  };
  const Row rows[] = {
      {[](KvShape& s) { s.num_layers = 0; }, "num_layers is 0"},
      {[](KvShape& s) { s.num_query_heads = 7; }, "num_query_heads is 7, want a multiple"},
      {[](KvShape& s) { s.head_dim = -8; }, "head_dim is -8"},
      {[](KvShape& s) { s.first_kv_head = 1; }, "KV heads are [1, 3)"},
      {[](KvShape& s) { s.page_tokens = 0; }, "page_tokens is 0"},
      {[](KvShape& s) { s.total_query_heads = 9; }, "total_query_heads is 9"},
  };
  EXPECT_TRUE(Shape().Validate().ok());
  for (const Row& row : rows) {
    KvShape shape = Shape();
    row.change(shape);
    EXPECT_EQ(shape.Validate().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(shape.Validate().message()), HasSubstr(row.error));
  }
}

}  // namespace
}  // namespace heavywater
