// Damaged requests against everything that a client can reach: nothing crashes,
// tiers stay balanced, and other sequences keep their bytes. Seeded.
#include <gtest/gtest.h>

#include <random>
#include <span>
#include <string>

#include "cache_service/base/crc32c.h"
#include "cache_service/registry/registry.h"
#include "cache_service/server/page_handlers.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

class RequestFuzzTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  RequestFuzzTest() : random_(GetParam()) {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](const auto& joined) { epoch_ = joined->epoch(); });
    id_ = registry_.Open(TestOpen("first", epoch_))->sequence_id();
  }

  // A valid message with some bytes changed, removed or added. False when it no
  // longer parses: gRPC would refuse it.
  template <typename Message>
  bool Damage(const Message& valid, Message* damaged) {
    std::string bytes = valid.SerializeAsString();
    const int changes = static_cast<int>(random_() % 4);
    for (int i = 0; i < changes && !bytes.empty(); ++i) {
      const size_t at = random_() % bytes.size();
      switch (random_() % 3) {
        case 0:
          bytes[at] = static_cast<char>(random_());
          break;
        case 1:
          bytes.erase(at, 1 + random_() % 3);
          break;
        default:
          bytes.insert(at, 1 + random_() % 10, static_cast<char>(random_()));
      }
    }
    return damaged->ParseFromString(bytes);
  }

  v1::ReserveRequest Reserve() const {
    v1::ReserveRequest request;
    request.set_sequence_id(id_);
    request.set_epoch(epoch_);
    request.set_num_kv_heads(2);
    request.set_num_pages(2);
    return request;
  }
  v1::WriteRequest Write() const {
    v1::WriteRequest request;
    request.set_sequence_id(id_);
    request.set_epoch(epoch_);
    request.set_rows(std::string(512, 'r'));
    request.set_crc32c(Crc32c(std::as_bytes(std::span<const char>(request.rows()))));
    return request;
  }
  v1::CommitRequest Commit() const {
    v1::CommitRequest request;
    request.set_sequence_id(id_);
    request.set_epoch(epoch_);
    request.set_tokens(2);
    return request;
  }
  v1::ReadRequest Read() const {
    v1::ReadRequest request;
    request.set_sequence_id(id_);
    request.set_num_positions(2);
    *request.mutable_fingerprint() = TestFingerprint();
    return request;
  }
  v1::ReportPlanRequest Report() {
    v1::ReportPlanRequest request;
    request.set_group("group");
    request.set_epoch(epoch_);
    v1::PlanReport& report = *request.add_reports();
    report.set_sequence_id(id_);
    report.set_plan(1 + random_() % 5);
    report.set_tokens_seen(20);
    report.set_watermark(20);
    report.add_dropped_ranges(1);
    report.add_dropped_ranges(3);
    report.add_tokens(5);
    for (int layer = 0; layer < 2; ++layer) {
      v1::ReportedSet& set = *report.add_sets();
      set.set_layer(layer);
      set.set_kv_head(-1);
      for (const int position : {0, 7, 19}) set.add_positions(position);
    }
    return request;
  }

  template <typename Request>
  Request RestOf() {
    Request request;
    request.set_sequence_id(id_);
    request.set_epoch(epoch_);
    for (int page = 0; page < 3; ++page) {
      request.mutable_pages()->add_layers(page % 2);
      request.mutable_pages()->add_kv_heads(0);
      request.mutable_pages()->add_pages(page);
    }
    return request;
  }

  void SendOne() {
    switch (random_() % 12) {
      case 0:
        if (v1::OpenSequenceRequest r; Damage(TestOpen("fuzz", epoch_), &r)) {
          (void)registry_.Open(r);
        }
        break;
      case 1:
        if (v1::ReserveRequest r; Damage(Reserve(), &r)) (void)handlers_.Reserve(r);
        break;
      case 2:
      case 3:
        if (v1::WriteRequest r; Damage(Write(), &r)) (void)handlers_.WriteChunk(r);
        break;
      case 4:
        if (v1::CommitRequest r; Damage(Commit(), &r)) (void)handlers_.Commit(r);
        break;
      case 5:
        if (v1::ReadRequest r; Damage(Read(), &r) && handlers_.StartRead(r).ok()) {
          v1::ReadResponse chunk;
          (void)handlers_.NextChunk(r, 0, &chunk);
        }
        break;
      case 6:
      case 7:
        if (v1::ReportPlanRequest r; Damage(Report(), &r)) (void)registry_.ReportPlan(r);
        break;
      case 8: {
        v1::GetSetsRequest request;
        request.set_sequence_id(id_);
        if (v1::GetSetsRequest r; Damage(request, &r)) (void)registry_.sequences().GetSets(r);
        break;
      }
      case 9:
        if (v1::RestRequest r; Damage(RestOf<v1::RestRequest>(), &r)) (void)handlers_.Rest(r);
        break;
      case 10:
        if (v1::AskRequest r; Damage(RestOf<v1::AskRequest>(), &r)) {
          (void)handlers_.RunForAsk(r, [&] { (void)handlers_.Ask(r); });
        }
        break;
      default: {
        v1::AbortRequest request;
        request.set_sequence_id(id_);
        request.set_epoch(epoch_);
        if (v1::AbortRequest r; Damage(request, &r)) (void)handlers_.Abort(r);
      }
    }
  }

  std::mt19937 random_;
  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 1 << 20)};
  Registry registry_{RegistryOptions{.max_sequences = 20}, store_, clock_};
  PageHandlers handlers_{registry_, store_, /*slab=*/nullptr};
  Epoch epoch_ = 0;
  SequenceId id_ = 0;
};

TEST_P(RequestFuzzTest, DamagedRequestsAreAnsweredAndBreakNothing) {
  v1::OpenSequenceRequest open = TestOpen("bystander", epoch_);
  const SequenceId bystander = registry_.Open(open)->sequence_id();
  v1::ReserveRequest reserve = Reserve();
  reserve.set_sequence_id(bystander);
  reserve.set_num_pages(1);
  ASSERT_TRUE(handlers_.Reserve(reserve).ok());
  v1::WriteRequest write = Write();
  write.set_sequence_id(bystander);
  for (int i = 0; i < 4; ++i) {
    write.set_layer(i / 2);
    write.set_kv_head(i % 2);
    ASSERT_TRUE(handlers_.WriteChunk(write).ok());
  }
  v1::CommitRequest commit = Commit();
  commit.set_sequence_id(bystander);
  ASSERT_TRUE(handlers_.Commit(commit).ok());

  for (int i = 0; i < 3000; ++i) {
    SendOne();
    const PageStoreStats stats = store_.Stats();
    ASSERT_EQ(stats.free_bytes + stats.used_bytes, stats.total_bytes);
    ASSERT_GE(stats.promised_bytes, 0);
  }
  v1::ReadRequest read = Read();
  read.set_sequence_id(bystander);
  v1::ReadResponse chunk;
  ASSERT_TRUE(handlers_.NextChunk(read, 0, &chunk).ok());
  EXPECT_EQ(chunk.rows(), std::string(512, 'r'));
}

INSTANTIATE_TEST_SUITE_P(Seeds, RequestFuzzTest, ::testing::Range(1u, 6u));

}  // namespace
}  // namespace heavywater
