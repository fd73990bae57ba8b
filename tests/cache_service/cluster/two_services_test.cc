// Cache services that share a real etcd and a real Redis, in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cache_service/cluster/directory.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/tier/redis_connection.h"
#include "heavywater/v1/error_details.pb.h"
#include "tests/cache_service/etcd/etcd_server.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/server/cache_service_fixture.h"
#include "tests/cache_service/tier/redis_server.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokens = 24;  // of pages of 16: one is not full
constexpr char kPrefix[] = "/test";

// One cache service, and a rank of one that writes to it. The clocks of all stand still at the
// same time: their sequence ids would be the same ones without slots.
class Service final : public CacheServiceFixture {
 public:
  Service(const std::string& etcd, const std::string& redis, const std::string& remote_copy,
          int64_t lease_ms) {
    config_.set_etcd_endpoints(etcd);
    config_.set_etcd_prefix(kPrefix);
    config_.set_etcd_lease_ms(2'000);
    config_.set_etcd_takeover_ms(2'000);
    config_.set_redis_address(redis);
    config_.set_remote_copy(remote_copy);
    config_.set_sequence_lease_ms(lease_ms);
    SetUp();
    Form(1);
  }
  void TestBody() override {}
  using CacheServiceFixture::Close;

  const std::string& address() const { return server_->address(); }
  SequenceId OpenOne(const std::string& request_id) {
    const auto opened = Open(request_id, kTokens);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.value_or(0);
  }

  // A finished sequence of kTokens; not suspended.
  SequenceId Finished(const std::string& request_id) {
    const SequenceId id = OpenOne(request_id);
    EXPECT_TRUE(Reserve(id, 2).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int64_t first = 0; first < kTokens; first += 16) {
          EXPECT_TRUE(Write({id, layer, head, first, std::min<int64_t>(16, kTokens - first)}).ok());
        }
      }
    }
    EXPECT_TRUE(Commit(id, kTokens).ok());
    v1::ReportPlanRequest report = TestFinished(epoch_, id, kTokens);
    AddTestState(kTokens, *report.mutable_reports(0));
    grpc::ClientContext context;
    v1::ReportPlanResponse response;
    EXPECT_TRUE(groups_->ReportPlan(&context, report, &response).ok());
    return id;
  }
  absl::Status Suspend(SequenceId id, int64_t ttl_ms = 0) {
    v1::SuspendSequenceRequest request;
    request.set_sequence_id(id);
    request.set_ttl_ms(ttl_ms);
    grpc::ClientContext context;
    v1::SuspendSequenceResponse response;
    return FromGrpcStatus(sequences_->Suspend(&context, request, &response));
  }
  absl::Status Pin(SequenceId id, int64_t ttl_ms) {
    v1::PinRequest request;
    request.set_request_id(absl::StrCat("pin", id));
    request.set_sequence_id(id);
    request.set_owner("test");
    request.set_ttl_ms(ttl_ms);
    grpc::ClientContext context;
    v1::PinResponse response;
    return FromGrpcStatus(v1::AdminService::NewStub(channel_)->Pin(&context, request, &response));
  }
  SequenceId Suspended(const std::string& request_id, int64_t ttl_ms = 0) {
    const SequenceId id = Finished(request_id);
    const absl::Status suspended = Suspend(id, ttl_ms);
    EXPECT_TRUE(suspended.ok()) << suspended;
    return id;
  }
  grpc::Status TryGet(SequenceId id, v1::Sequence* sequence) {
    v1::GetSequenceRequest request;
    request.set_sequence_id(id);
    grpc::ClientContext context;
    return sequences_->Get(&context, request, sequence);
  }
  // Asks until somebody knows; a service that is lost may be back for a while.
  absl::StatusOr<v1::Sequence> Get(SequenceId id) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (true) {
      v1::Sequence sequence;
      const absl::Status got = FromGrpcStatus(TryGet(id, &sequence));
      if (got.ok()) return sequence;
      if (!absl::IsUnavailable(got) || absl::Now() > deadline) return got;
      absl::SleepFor(absl::Milliseconds(50));
    }
  }
  absl::StatusOr<v1::ReopenSequenceResponse> Reopen(SequenceId id, const std::string& request_id) {
    v1::OpenSequenceRequest opened = TestOpen(request_id, epoch_);
    opened.set_max_tokens(100'000);
    opened.set_prompt_tokens(kTokens);
    v1::ReopenSequenceRequest request = TestReopen(opened, id, epoch_);
    request.set_max_tokens_seen(kTokens);
    for (int32_t token = 0; token < kTokens; ++token) request.add_tokens(100 + token);
    grpc::ClientContext context;
    v1::ReopenSequenceResponse response;
    const grpc::Status status = sequences_->Reopen(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }
  void ExpectRowsOf(SequenceId id) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (const int64_t first : {0, 5, 16, 20}) {
          const TestRows rows = {id, layer, head, first, 4};
          const auto read = Read(rows);
          ASSERT_TRUE(read.ok()) << read.status();
          EXPECT_EQ(*read, rows.Bytes(row_bytes())) << layer << " " << head << " " << first;
        }
      }
    }
  }
  bool HasIt(SequenceId id) {
    grpc::ClientContext context;
    v1::ListSequencesResponse response;
    EXPECT_TRUE(sequences_->List(&context, {}, &response).ok());
    return std::any_of(response.sequences().begin(), response.sequences().end(),
                       [id](const v1::Sequence& one) { return one.sequence_id() == id; });
  }
};

class TwoServicesTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    etcd_server_ = EtcdServer::Start(&reason);
    if (etcd_server_ == nullptr) GTEST_SKIP() << reason;
    redis_ = RedisServer::Start(&reason);
    if (redis_ == nullptr) GTEST_SKIP() << reason;
    auto etcd = EtcdClient::Create({.endpoints = {etcd_server_->address()}});
    ASSERT_TRUE(etcd.ok());
    etcd_ = *std::move(etcd);
    directory_.emplace(*etcd_, kPrefix, "test");
    // It listens a moment before it serves.
    Await([&] { return etcd_->Get("a").ok(); });
  }
  std::unique_ptr<Service> Start(const std::string& remote_copy = "suspended",
                                 int64_t lease_ms = 60'000) {
    return std::make_unique<Service>(etcd_server_->address(), redis_->address(), remote_copy,
                                     lease_ms);
  }
  static void Await(const std::function<bool()>& condition, int seconds = 30) {
    const absl::Time deadline = absl::Now() + absl::Seconds(seconds);
    while (!condition()) {
      ASSERT_LT(absl::Now(), deadline);
      absl::SleepFor(absl::Milliseconds(20));
    }
  }
  std::optional<v1::SequenceRecord> RecordOf(SequenceId id) {
    const auto found = directory_->Find(id);
    if (!found.ok() || !found->has_value()) return std::nullopt;
    return (*found)->record;
  }
  void AwaitCopy(SequenceId id) {
    Await([&] { return RecordOf(id).has_value() && RecordOf(id)->has_copy(); });
  }
  int64_t CopiesInRedis() {
    auto redis = RedisConnection::Connect("127.0.0.1", redis_->port(), absl::Seconds(1));
    EXPECT_TRUE(redis.ok() && (*redis)->Send({"DBSIZE"}).ok());
    const auto reply = (*redis)->Receive();
    return reply.ok() ? (*reply)->integer : -1;
  }

  std::unique_ptr<EtcdServer> etcd_server_;
  std::unique_ptr<RedisServer> redis_;
  std::unique_ptr<EtcdClient> etcd_;
  std::optional<Directory> directory_;
};

TEST_F(TwoServicesTest, ASuspendedSequenceOfALostServiceComesBackElsewhereWithItsBytes) {
  auto a = Start();
  auto b = Start();
  const SequenceId id = a->Suspended("request");
  AwaitCopy(id);
  EXPECT_EQ(CopiesInRedis(), 1);
  a.reset();
  const auto sequence = b->Get(id);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_TRUE(sequence->suspended());
  EXPECT_TRUE(sequence->finished());
  EXPECT_EQ(sequence->num_tokens(), kTokens);
  EXPECT_EQ(sequence->prompt_tokens(), kTokens);
  b->ExpectRowsOf(id);
  const auto reopened = b->Reopen(id, "request");
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->known_tokens(), kTokens);
  b->ExpectRowsOf(id);
  // Its end takes the copy along.
  ASSERT_TRUE(b->Close(id).ok());
  Await([&] { return !RecordOf(id).has_value(); });
  Await([&] { return CopiesInRedis() == 0; });
}

TEST_F(TwoServicesTest, AnotherServiceSaysWhereALivingSequenceIs) {
  auto a = Start();
  auto b = Start();
  const SequenceId id = a->OpenOne("request");
  Await([&] { return RecordOf(id).has_value(); });
  v1::Sequence sequence;
  grpc::Status status;
  Await([&] {
    status = b->TryGet(id, &sequence);
    return status.error_code() != grpc::StatusCode::UNAVAILABLE;
  });
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr(a->address()));
  v1::RpcStatus details;
  v1::ErrorInfo info;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  ASSERT_EQ(details.details_size(), 1);
  ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
  EXPECT_EQ(info.reason(), "SEQUENCE_ELSEWHERE");
  EXPECT_EQ(info.metadata().at("address"), a->address());
  EXPECT_EQ(b->Get(id + 64 * 1000).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TwoServicesTest, ServicesThatStartAtTheSameTimeGiveDifferentIds) {
  auto a = Start();
  auto b = Start();
  std::set<SequenceId> ids;
  for (int i = 0; i < 5; ++i) {
    ids.insert(a->OpenOne(absl::StrCat("a", i)));
    ids.insert(b->OpenOne(absl::StrCat("b", i)));
  }
  EXPECT_EQ(ids.size(), 10u);
}

TEST_F(TwoServicesTest, OfTwoThatTakeASequenceOverOneHasItAndTheOtherSaysSo) {
  auto a = Start();
  auto b = Start();
  auto c = Start();
  std::vector<SequenceId> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(a->Suspended(absl::StrCat("request", i)));
  for (const SequenceId id : ids) AwaitCopy(id);
  a.reset();
  for (const SequenceId id : ids) {
    absl::StatusOr<v1::Sequence> at_b;
    std::thread other([&] { at_b = b->Get(id); });
    const absl::StatusOr<v1::Sequence> at_c = c->Get(id);
    other.join();
    EXPECT_NE(at_b.ok(), at_c.ok()) << at_b.status() << " " << at_c.status();
    EXPECT_NE(b->HasIt(id), c->HasIt(id));
    EXPECT_EQ((at_b.ok() ? at_c : at_b).status().code(), absl::StatusCode::kFailedPrecondition);
    (at_b.ok() ? b : c)->ExpectRowsOf(id);
  }
}

TEST_F(TwoServicesTest, WhatHasNoCopyIsLostByNameWithItsService) {
  auto a = Start("none");
  auto b = Start();
  const SequenceId suspended = a->Suspended("request");
  Await([&] { return RecordOf(suspended).has_value() && RecordOf(suspended)->suspended(); });
  const std::string address = a->address();
  a.reset();
  const absl::Status lost = b->Get(suspended).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lost.message()), HasSubstr(address));
}

TEST_F(TwoServicesTest, FinishedSequencesAreCopiedWhereThatIsWanted) {
  auto a = Start("finished");
  auto b = Start("finished");
  const SequenceId id = a->Finished("request");
  AwaitCopy(id);
  a.reset();
  const auto sequence = b->Get(id);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_FALSE(sequence->suspended());
  b->ExpectRowsOf(id);
}

TEST_F(TwoServicesTest, AServiceWhoseSequenceWasTakenOverEndsItsOwn) {
  auto a = Start();
  auto b = Start();
  const SequenceId id = a->Suspended("request");
  AwaitCopy(id);
  // Its record as it stays, with its group.
  const std::string key = absl::StrCat(kPrefix, "/services/", RecordOf(id)->owner());
  Await([&] {
    const auto entry = etcd_->Get(key);
    v1::ServiceRecord record;
    return entry.ok() && entry->has_value() && record.ParseFromString((*entry)->value) &&
           record.groups_size() == 1;
  });
  // As if it had not been heard of: cut off from etcd, say.
  ASSERT_TRUE(etcd_->Commit({}, {{key, std::nullopt}}).ok());
  Await([&] { return b->Get(id).ok(); });
  Await([&] { return !a->HasIt(id); });
  EXPECT_TRUE(b->HasIt(id));
  EXPECT_EQ(RecordOf(id)->address(), b->address());
  b->ExpectRowsOf(id);
}

TEST_F(TwoServicesTest, NothingIsLostWhileEtcdIsAway) {
  auto a = Start();
  auto b = Start();
  const SequenceId before = a->Suspended("before");
  AwaitCopy(before);
  etcd_server_->Kill();
  const SequenceId during = a->Suspended("during");
  const SequenceId running = a->OpenOne("running");
  EXPECT_EQ(b->TryGet(before, std::make_unique<v1::Sequence>().get()).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  absl::SleepFor(absl::Seconds(4));  // twice as long as leases live
  EXPECT_TRUE(a->HasIt(before) && a->HasIt(during) && a->HasIt(running));
  std::string reason;
  ASSERT_TRUE(etcd_server_->StartAgain(&reason)) << reason;
  AwaitCopy(during);
  Await([&] { return RecordOf(running).has_value(); });
  EXPECT_TRUE(a->HasIt(before) && a->HasIt(during) && a->HasIt(running));
  EXPECT_EQ(b->Get(before).status().code(), absl::StatusCode::kFailedPrecondition);
  a.reset();
  for (const SequenceId id : {before, during}) {
    ASSERT_TRUE(b->Get(id).ok()) << b->Get(id).status();
    b->ExpectRowsOf(id);
  }
  EXPECT_EQ(b->Get(running).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(TwoServicesTest, AnEtcdThatStandsStillForLongerThanLeasesLosesNothing) {
  auto a = Start();
  auto b = Start();
  const SequenceId id = a->Suspended("request");
  AwaitCopy(id);
  etcd_server_->Pause();
  absl::SleepFor(absl::Seconds(5));
  etcd_server_->Continue();
  // Its leases end now, before anybody has renewed them: nobody takes anything over at once.
  const absl::Time until = absl::Now() + absl::Seconds(4);
  while (absl::Now() < until) {
    v1::Sequence sequence;
    EXPECT_FALSE(b->TryGet(id, &sequence).ok());
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_TRUE(a->HasIt(id));
  EXPECT_FALSE(b->HasIt(id));
}

TEST_F(TwoServicesTest, WhatHasEndedHereIsGoneAlsoWhileEtcdIsAway) {
  auto a = Start();
  const SequenceId ended = a->OpenOne("ended");
  ASSERT_TRUE(a->Close(ended).ok());
  etcd_server_->Kill();
  v1::Sequence sequence;
  EXPECT_EQ(a->TryGet(ended, &sequence).error_code(), grpc::StatusCode::NOT_FOUND);
  // Of others nobody knows: an id of another service, and one that nobody has given out yet.
  EXPECT_EQ(a->TryGet(ended + 1, &sequence).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(a->TryGet(ended + 64, &sequence).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TwoServicesTest, APinKeepsWhatOthersKnowOfASequenceAsLongAsItself) {
  auto a = Start("suspended", 1'000);
  const SequenceId id = a->Suspended("request", 1'000);
  AwaitCopy(id);
  const int64_t lease_end = RecordOf(id)->expires_ms();
  ASSERT_TRUE(a->Pin(id, 3'600'000).ok());
  Await([&] { return RecordOf(id)->expires_ms() > lease_end + 3'000'000; });
  Await([&] { return RecordOf(id)->copy().expires_ms() >= RecordOf(id)->expires_ms(); });
}

TEST_F(TwoServicesTest, ACopyIsMadeOnceTheRedisIsThere) {
  auto a = Start();
  redis_->Pause();
  const SequenceId id = a->Suspended("request");
  Await([&] { return RecordOf(id).has_value(); });
  EXPECT_FALSE(RecordOf(id)->has_copy());
  redis_->Continue();
  AwaitCopy(id);
}

TEST_F(TwoServicesTest, TheLeaderRemovesWhatIsLeftOfALostServiceWhenItsTimeIsOver) {
  auto a = Start("suspended", 1'000);
  auto b = Start();
  const SequenceId brief = a->Suspended("brief", 1'000);
  const SequenceId kept = a->Suspended("kept");
  AwaitCopy(brief);
  AwaitCopy(kept);
  a.reset();
  // After a margin for clocks that differ.
  Await([&] { return !RecordOf(brief).has_value(); });
  EXPECT_TRUE(RecordOf(kept).has_value());
  Await([&] { return CopiesInRedis() == 1; });
}

}  // namespace
}  // namespace heavywater
