// PageStoreService over a real channel.
#include <gmock/gmock.h>

#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/tier/slab_view.h"
#include "tests/cache_service/server/cache_service_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PageStoreServiceTest : public CacheServiceFixture {
 protected:
  void SetUp() override {
    CacheServiceFixture::SetUp();
    Form(1);
  }
  SequenceId MustOpen(const std::string& request_id) {
    const auto sequence = Open(request_id);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.value_or(0);
  }
  // All layers and heads of one sequence's first page.
  absl::Status WritePage(SequenceId sequence) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        const auto written = Write({sequence, layer, head, 0, 16});
        if (!written.ok()) return written.status();
      }
    }
    return absl::OkStatus();
  }
};

TEST_F(PageStoreServiceTest, StreamedRowsReadBackBitForBit) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  ASSERT_TRUE(WritePage(sequence).ok());
  EXPECT_EQ(Read({sequence, 1, 0, 3, 5}).status().code(), absl::StatusCode::kOutOfRange)
      << "nothing is readable before commit";
  ASSERT_TRUE(Commit(sequence, 16).ok());
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      const TestRows rows = {sequence, layer, head, 3, 13};
      const auto bytes = Read(rows);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      EXPECT_EQ(*bytes, rows.Bytes(row_bytes()));
    }
  }
}

TEST_F(PageStoreServiceTest, ARankWithTheSlabWritesInPlaceAndOthersReadThroughTheService) {
  v1::AttachRequest attach;
  attach.set_group("group");
  attach.set_epoch(epoch_);
  v1::AttachResponse attached;
  grpc::ClientContext context;
  ASSERT_TRUE(pages_->Attach(&context, attach, &attached).ok());
  const auto view = SlabView::Map(attached.slab_name(), attached.slab_bytes(),
                                  attached.slab_nonce(), attached.format_version());
  ASSERT_TRUE(view.ok()) << view.status();

  const SequenceId sequence = MustOpen("request");
  const auto reserved = Reserve(sequence, 2);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  ASSERT_EQ(reserved->offsets_size(), 2 * 2 * 2);
  const TestRows rows = {sequence, 1, 0, 16, 16};  // [layer 1][head 0][page 1]
  std::byte* const page = (*view)->At(reserved->offsets((1 * 2 + 0) * 2 + 1), 4096);
  ASSERT_NE(page, nullptr);
  std::memcpy(page, rows.Bytes(row_bytes()).data(), 4096);
  auto* const watermark = (*view)->Watermark(reserved->watermark_offset());
  ASSERT_NE(watermark, nullptr);
  EXPECT_EQ(Read(rows).status().code(), absl::StatusCode::kOutOfRange);
  PublishWatermark(*watermark, 32);
  const auto bytes = Read(rows);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, rows.Bytes(row_bytes()));
  page[7] ^= std::byte{1};
  EXPECT_EQ(Read(rows).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(PageStoreServiceTest, WithoutASlabRanksAreToldToStream) {
  config_.set_disable_slab(true);
  Restart();
  Form(1);
  v1::AttachRequest attach;
  attach.set_group("group");
  attach.set_epoch(epoch_);
  v1::AttachResponse attached;
  grpc::ClientContext context;
  ASSERT_TRUE(pages_->Attach(&context, attach, &attached).ok());
  EXPECT_EQ(attached.slab_name(), "");
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  ASSERT_TRUE(WritePage(sequence).ok());
  ASSERT_TRUE(Commit(sequence, 16).ok());
  EXPECT_EQ(*Read({sequence, 0, 1, 0, 16}), (TestRows{sequence, 0, 1, 0, 16}).Bytes(row_bytes()));
}

TEST_F(PageStoreServiceTest, AnotherFingerprintIsRefusedNamingTheField) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  ASSERT_TRUE(WritePage(sequence).ok());
  ASSERT_TRUE(Commit(sequence, 16).ok());
  v1::ReadRequest request = ReadRequest({sequence, 0, 0, 0, 1});
  *request.mutable_fingerprint() = fingerprint_;
  request.mutable_fingerprint()->set_rope("500000");
  grpc::ClientContext context;
  const auto stream = pages_->Read(&context, request);
  v1::ReadResponse chunk;
  EXPECT_FALSE(stream->Read(&chunk));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(),
              AllOf(HasSubstr("fingerprint.rope"), HasSubstr("500000"), HasSubstr("10000")));
}

TEST_F(PageStoreServiceTest, PagesThatTheirRankGivesUpAreMissesAndHoldNothingBack) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 2).ok());
  ASSERT_TRUE(WritePage(sequence).ok());
  v1::AbortRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(epoch_);
  request.set_first_page(1);
  const auto abort = [&] {
    grpc::ClientContext context;
    v1::AbortResponse response;
    const absl::Status status = FromGrpcStatus(pages_->Abort(&context, request, &response));
    return status.ok() ? absl::StatusOr<int64_t>(response.pages_freed()) : status;
  };
  EXPECT_EQ(abort().status().code(), absl::StatusCode::kInvalidArgument)
      << "a page without a count";
  request.set_num_pages(1);
  EXPECT_EQ(*abort(), 2 * 2);
  ASSERT_TRUE(Commit(sequence, 32).ok());
  EXPECT_TRUE(Read({sequence, 0, 0, 0, 16}).ok());
  EXPECT_EQ(Read({sequence, 0, 0, 16, 16}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(sequence, 2).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(PageStoreServiceTest, PagesRestAndAreAskedForByTheirRank) {
  const SequenceId sequence = MustOpen("request");
  const auto reserved = Reserve(sequence, 1);
  ASSERT_TRUE(reserved.ok());
  ASSERT_TRUE(WritePage(sequence).ok());
  v1::RestRequest rest;
  rest.set_sequence_id(sequence);
  rest.set_epoch(epoch_);
  v1::AskRequest ask;
  ask.set_sequence_id(sequence);
  ask.set_epoch(epoch_);
  for (v1::PageIds* pages : {rest.mutable_pages(), ask.mutable_pages()}) {
    for (const int layer : {1, 0}) {
      pages->add_layers(layer);
      pages->add_kv_heads(1);
      pages->add_pages(0);
    }
  }
  ask.mutable_pages()->set_pages(1, 7);  // is not there
  const auto rest_code = [&] {
    grpc::ClientContext context;
    v1::RestResponse response;
    return FromGrpcStatus(pages_->Rest(&context, rest, &response)).code();
  };
  EXPECT_EQ(rest_code(), absl::StatusCode::kFailedPrecondition) << "nothing is committed";
  ASSERT_TRUE(Commit(sequence, 16).ok());
  EXPECT_EQ(rest_code(), absl::StatusCode::kOk);
  {
    grpc::ClientContext context;
    v1::AskResponse response;
    const absl::Status asked = FromGrpcStatus(pages_->Ask(&context, ask, &response));
    ASSERT_TRUE(asked.ok()) << asked;
    ASSERT_EQ(response.offsets_size(), 2);
    EXPECT_GE(response.offsets(0), 0);
    EXPECT_EQ(response.codes(0), 0);
    EXPECT_EQ(response.offsets(1), -1);
    EXPECT_EQ(response.codes(1), static_cast<int>(absl::StatusCode::kNotFound));
  }
  rest.mutable_pages()->add_pages(0);
  EXPECT_EQ(rest_code(), absl::StatusCode::kInvalidArgument) << "lists of several lengths";
  rest.mutable_pages()->mutable_pages()->RemoveLast();
  rest.set_epoch(epoch_ + 1);
  EXPECT_EQ(rest_code(), absl::StatusCode::kAborted);
  rest.set_epoch(epoch_);
  rest.set_sequence_id(sequence + 1);
  EXPECT_EQ(rest_code(), absl::StatusCode::kNotFound);
}

TEST_F(PageStoreServiceTest, AWriteThatFailsIsInvisibleAndTheSameWriteSucceedsLater) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  std::vector<v1::WriteRequest> chunks;
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      chunks.push_back(ChunksOf({sequence, layer, head, 0, 16}).at(0));
    }
  }
  chunks[3].set_crc32c(chunks[3].crc32c() + 1);  // damaged on the way
  const auto written = WriteChunks(chunks);
  EXPECT_EQ(written.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(written.status().message()), HasSubstr("crc32c"));
  const absl::Status commit = Commit(sequence, 16);
  EXPECT_EQ(commit.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(commit.message()), HasSubstr("layer 1, kv_head 1"));
  EXPECT_EQ(Read({sequence, 0, 0, 0, 1}).status().code(), absl::StatusCode::kOutOfRange);
  ASSERT_EQ(*Write({sequence, 1, 1, 0, 16}), 16);
  ASSERT_TRUE(Commit(sequence, 16).ok());
  EXPECT_EQ(*Read({sequence, 1, 1, 0, 16}), (TestRows{sequence, 1, 1, 0, 16}).Bytes(row_bytes()));
}

TEST_F(PageStoreServiceTest, AFullTierNamesNeedFreeAndLimit) {
  const SequenceId sequence = MustOpen("request");
  const auto refused = Reserve(sequence, 64);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("need 1048576"), HasSubstr("of 1048576")));
  EXPECT_EQ(HostTier().reservations_refused(), 1);
  EXPECT_EQ(HostTier().pages(), 0);
  const auto large = Open("large", 100'000);
  EXPECT_EQ(large.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(PageStoreServiceTest, AStaleEpochIsAborted) {
  const SequenceId sequence = MustOpen("request");
  --epoch_;
  EXPECT_EQ(Reserve(sequence, 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Write({sequence, 0, 0, 0, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Commit(sequence, 0).code(), absl::StatusCode::kAborted);
}

TEST_F(PageStoreServiceTest, UnknownAndOutOfRangeRequestsChangeNothing) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  const v1::TierStats before = HostTier();
  EXPECT_EQ(Reserve(12345, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(sequence, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Reserve(sequence, 1, /*rank=*/1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Write({12345, 0, 0, 0, 1}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Write({sequence, 2, 0, 0, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Write({sequence, 0, 0, -1, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Write({sequence, 0, 0, 16, 1}).status().code(), absl::StatusCode::kNotFound);
  v1::WriteRequest ragged = ChunksOf({sequence, 0, 0, 0, 1}).at(0);
  ragged.mutable_rows()->resize(100);
  ragged.set_crc32c(Crc32c(std::as_bytes(std::span<const char>(ragged.rows()))));
  const auto refused = WriteChunks({ragged});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("100 bytes"));
  EXPECT_EQ(Read({12345, 0, 0, 0, 1}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Read({sequence, 0, 0, 0, 17}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Read({sequence, 0, 5, 0, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Commit(sequence, 100'001).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostTier().DebugString(), before.DebugString());
}

TEST_F(PageStoreServiceTest, CyclesThroughTheServiceLeakNothing) {
  for (int i = 0; i < 300; ++i) {
    const SequenceId sequence = MustOpen(absl::StrCat("request", i));
    ASSERT_TRUE(Reserve(sequence, 2).ok());
    EXPECT_EQ(Read({sequence, 0, 0, 0, 1}).status().code(), absl::StatusCode::kOutOfRange);
    ASSERT_TRUE(Close(sequence).ok());
  }
  EXPECT_EQ(HostTier().free_bytes(), HostTier().total_bytes());
  EXPECT_EQ(HostTier().pages(), 0);
}

// Pages of 16 MiB: many chunks each.
class LargePageTest : public PageStoreServiceTest {
 protected:
  void SetUp() override {
    fingerprint_.set_num_layers(1);
    fingerprint_.set_num_kv_heads(1);
    fingerprint_.set_head_dim(512);
    fingerprint_.set_page_tokens(8192);
    config_.set_host_bytes(kPageBytes + 8192);  // room for one
    PageStoreServiceTest::SetUp();
  }
  static constexpr int64_t kPageBytes = int64_t{8192} * 2048;
};

TEST_F(LargePageTest, MuchMoreThanAMessageTravelsInChunksBothWays) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  const TestRows rows = {sequence, 0, 0, 0, 8192};
  EXPECT_EQ(*Write(rows), 8192);
  ASSERT_TRUE(Commit(sequence, 8192).ok());
  const auto bytes = Read(rows);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_TRUE(*bytes == rows.Bytes(row_bytes())) << "bytes differ";
}

TEST_F(LargePageTest, AChunkAboveItsLimitIsRefusedNamingTheLimitAndStoresNothing) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  v1::WriteRequest chunk = ChunksOf({sequence, 0, 0, 0, 1}).at(0);
  for (const int64_t size : {(1 << 20) + 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 40 << 20}) {
    chunk.set_rows(std::string(size, 'x'));
    const auto written = WriteChunks({chunk});
    ASSERT_FALSE(written.ok());
    const bool fits_message = size < (4 << 20) - 100;
    EXPECT_EQ(written.status().code(), fits_message ? absl::StatusCode::kInvalidArgument
                                                    : absl::StatusCode::kResourceExhausted)
        << size << ": " << written.status();
    EXPECT_THAT(std::string(written.status().message()),
                HasSubstr(fits_message ? "1048576" : "4194304"));
  }
  EXPECT_EQ(Commit(sequence, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*Write({sequence, 0, 0, 0, 1}), 1) << "the server is up";
}

TEST_F(LargePageTest, AReaderSlowerThanItsSequenceGetsItsOwnBytesOrAborted) {
  const SequenceId first = MustOpen("first");
  ASSERT_TRUE(Reserve(first, 1).ok());
  const TestRows rows = {first, 0, 0, 0, 8192};
  ASSERT_TRUE(Write(rows).ok());
  ASSERT_TRUE(Commit(first, 8192).ok());
  grpc::ClientContext context;
  const auto stream = pages_->Read(&context, ReadRequest(rows));
  v1::ReadResponse chunk;
  ASSERT_TRUE(stream->Read(&chunk));
  std::string bytes = chunk.rows();

  // Meanwhile the place gets another owner and other bytes.
  ASSERT_TRUE(Close(first).ok());
  const SequenceId second = MustOpen("second");
  ASSERT_TRUE(Reserve(second, 1).ok());
  ASSERT_TRUE(Write({second, 0, 0, 0, 8192}).ok());
  ASSERT_TRUE(Commit(second, 8192).ok());

  while (stream->Read(&chunk)) bytes += chunk.rows();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED) << status.error_message();
  EXPECT_LT(bytes.size(), static_cast<size_t>(kPageBytes));
  EXPECT_TRUE(rows.Bytes(row_bytes()).compare(0, bytes.size(), bytes) == 0) << "foreign bytes";
}

TEST_F(LargePageTest, CancelledReadsHoldNothing) {
  const SequenceId sequence = MustOpen("request");
  ASSERT_TRUE(Reserve(sequence, 1).ok());
  const TestRows rows = {sequence, 0, 0, 0, 8192};
  ASSERT_TRUE(Write(rows).ok());
  ASSERT_TRUE(Commit(sequence, 8192).ok());
  for (int i = 0; i < 50; ++i) {
    grpc::ClientContext context;
    const auto stream = pages_->Read(&context, ReadRequest(rows));
    v1::ReadResponse chunk;
    for (int read = 0; read < i % 3; ++read) ASSERT_TRUE(stream->Read(&chunk));
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ASSERT_TRUE(Close(sequence).ok());
  EXPECT_EQ(HostTier().free_bytes(), HostTier().total_bytes());
  const SequenceId next = MustOpen("next");
  EXPECT_TRUE(Reserve(next, 1).ok());
}

}  // namespace
}  // namespace heavywater
