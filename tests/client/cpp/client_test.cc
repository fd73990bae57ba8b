#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/cpp/fake_services.h"

namespace heavywater {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&generation_);
    builder.RegisterService(&sequences_);
    builder.RegisterService(&pages_);
    server_ = builder.BuildAndStart();
    const auto channel = server_->InProcessChannel({});
    client_ = std::make_unique<Client>(v1::GenerationService::NewStub(channel),
                                       v1::SequenceService::NewStub(channel),
                                       v1::PageStoreService::NewStub(channel), milliseconds(5000),
                                       [this](milliseconds backoff) { slept_.push_back(backoff); });
  }

  static v1::GenerateRequest Request(int max_new_tokens, const std::string& text = "hello") {
    v1::GenerateRequest request;
    request.set_text(text);
    request.set_max_new_tokens(max_new_tokens);
    return request;
  }

  FakeGeneration generation_;
  FakeSequences sequences_{5};
  FakePages pages_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<milliseconds> slept_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTest, GenerateHandsOverEachTokenAndReturnsTheSummary) {
  std::string text;
  const auto summary = client_->Generate(Request(3), [&text](const v1::GenerateResponse& token) {
    text += token.text();
    return true;
  });
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(text, "t0 t1 t2 ");
  EXPECT_EQ(summary->finish_reason(), "length");
}

TEST_F(ClientTest, GenerateStopsTheServerWhenTheCallbackSaysSo) {
  int seen = 0;
  const auto summary = client_->Generate(Request(FakeGeneration::kEndless),
                                         [&seen](const auto&) { return ++seen < 2; });
  EXPECT_EQ(summary.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(seen, 2);
  server_->Shutdown();  // waits for the handler
  EXPECT_TRUE(generation_.cancelled);
}

TEST_F(ClientTest, GenerationGivesTokensOneByOneAndTheSummaryAtTheEnd) {
  const auto generation = client_->Generate(Request(1));
  ASSERT_TRUE(generation.ok());
  EXPECT_EQ((*generation)->Summary().status().code(), absl::StatusCode::kFailedPrecondition);
  const auto token = (*generation)->Next();
  ASSERT_TRUE(token.ok() && token->has_value());
  EXPECT_EQ((*token)->text(), "t0 ");
  EXPECT_EQ((*generation)->sequence_id(), 7u);
  for (int i = 0; i < 2; ++i) {  // the end stays the end
    const auto end = (*generation)->Next();
    ASSERT_TRUE(end.ok());
    EXPECT_FALSE(end->has_value());
  }
  EXPECT_EQ((*generation)->Summary()->new_tokens(), 1);
}

TEST_F(ClientTest, AGenerationThatBreaksOffGoesOnWithEachTokenOnce) {
  generation_.breaks = 2;
  generation_.breaks_at = 3;
  std::vector<int> indices;
  const auto summary = client_->Generate(Request(5), [&](const v1::GenerateResponse& token) {
    indices.push_back(token.index());
    return true;
  });
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_THAT(indices, ElementsAre(0, 1, 2, 3, 4));
  ASSERT_EQ(generation_.requests.size(), 3u);
  const v1::GenerateRequest& last = generation_.requests.back();
  EXPECT_EQ(last.resume().sequence_id(), 7u);
  EXPECT_EQ(last.resume().from_token(), 3);
  EXPECT_THAT(last.resume().received_tokens(), ElementsAre(100, 101, 102));
  EXPECT_EQ(last.text(), "hello");
  EXPECT_THAT(slept_, ElementsAre(milliseconds(100), milliseconds(200)));
}

TEST_F(ClientTest, AGenerationThatWasNeverAcceptedIsNotRepeated) {
  generation_.breaks_before_accepting = true;
  const auto summary = client_->Generate(Request(5), [](const auto&) { return true; });
  EXPECT_EQ(summary.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(generation_.requests.size(), 1u);
}

TEST_F(ClientTest, AGenerationDoesNotGoOnWhereItsCallerWantsNone) {
  generation_.breaks = 1;
  generation_.breaks_at = 1;
  Client once(
      v1::GenerationService::NewStub(server_->InProcessChannel({})), nullptr, nullptr,
      milliseconds(5000), [](milliseconds) {}, /*resume_timeout=*/milliseconds(0));
  const auto summary = once.Generate(Request(5), [](const auto&) { return true; });
  EXPECT_EQ(summary.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(generation_.requests.size(), 1u);
}

TEST_F(ClientTest, GenerateReturnsTheServersErrorWithItsWords) {
  const auto summary = client_->Generate(Request(3, ""), [](const auto&) { return true; });
  EXPECT_EQ(summary.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(summary.status().message()), HasSubstr("text is empty"));
}

TEST_F(ClientTest, GetModelJoinsThePartsInOrder) {
  const auto model = client_->GetModel();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->info.name(), "tiny");
  std::vector<std::string> pieces;
  for (const v1::Piece& piece : model->pieces) pieces.push_back(piece.text());
  EXPECT_THAT(pieces, ElementsAre("a", "b", "ab"));
  EXPECT_THAT(model->merges, ElementsAre("a b"));
}

TEST_F(ClientTest, ReadsAreRepeatedWithBackoffWhileTheServerIsUnavailable) {
  sequences_.failures = 2;
  sequences_.num_tokens = 0;
  const auto sequence = client_->Get(3);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(sequence->sequence_id(), 3u);
  EXPECT_THAT(slept_, ElementsAre(kReadBackoffs[0], kReadBackoffs[1]));
}

TEST_F(ClientTest, AReadGivesUpWithTheLastErrorAfterItsBackoffs) {
  sequences_.failures = 100;
  EXPECT_EQ(client_->Get(3).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sequences_.calls, 4);
  EXPECT_EQ(slept_.size(), kReadBackoffs.size());
}

TEST_F(ClientTest, ErrorsOtherThanUnavailableAreNotRepeated) {
  EXPECT_EQ(client_->Get(99).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(sequences_.calls, 1);
}

TEST_F(ClientTest, MutationsAreNeverRepeated) {
  sequences_.failures = 100;
  EXPECT_EQ(client_->Open({}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client_->Close(1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sequences_.calls, 2);
  EXPECT_TRUE(slept_.empty());
}

TEST_F(ClientTest, EveryMutationCarriesARequestIdOfItsOwn) {
  v1::OpenSequenceRequest named;
  named.set_request_id("mine");
  ASSERT_TRUE(client_->Open(named).ok());
  ASSERT_TRUE(client_->Open({}).ok());
  ASSERT_TRUE(client_->Close(1).ok());
  ASSERT_EQ(sequences_.request_ids.size(), 3u);
  EXPECT_EQ(sequences_.request_ids[0], "mine");
  EXPECT_EQ(sequences_.request_ids[1].size(), 32u);
  EXPECT_NE(sequences_.request_ids[1], sequences_.request_ids[2]);
}

TEST_F(ClientTest, SuspendAndResumeNameTheSequence) {
  const auto suspended = client_->Suspend(9, 5000);
  ASSERT_TRUE(suspended.ok()) << suspended.status();
  EXPECT_EQ(suspended->ttl_ms(), 5000);
  EXPECT_EQ(sequences_.suspended, 9u);
  EXPECT_EQ(client_->Resume(8).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(client_->Resume(9).ok());
  EXPECT_EQ(sequences_.suspended, 0u);
}

TEST_F(ClientTest, ForkNamesTheSequenceAndBringsARequestId) {
  v1::ForkSequenceRequest request;
  request.set_sequence_id(9);
  request.set_lease_ms(2500);
  const auto forked = client_->Fork(request);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_EQ(forked->sequence_id(), 10);
  EXPECT_EQ(sequences_.forked.sequence_id(), 9);
  EXPECT_EQ(sequences_.forked.lease_ms(), 2500);
  EXPECT_EQ(sequences_.forked.request_id().size(), 32);
  request.set_request_id("mine");
  ASSERT_TRUE(client_->Fork(request).ok());
  EXPECT_EQ(sequences_.forked.request_id(), "mine");
}

TEST_F(ClientTest, TruncateNamesTheSequenceAndTheTokensThatStay) {
  const auto truncated = client_->Truncate(9, 40);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_EQ(truncated->tokens_seen(), 39);
  EXPECT_EQ(sequences_.truncated, std::make_pair(uint64_t{9}, int64_t{40}));
}

TEST_F(ClientTest, ListFollowsThePages) {
  const auto sequences = client_->List();
  ASSERT_TRUE(sequences.ok()) << sequences.status();
  std::vector<uint64_t> ids;
  for (const v1::Sequence& sequence : *sequences) ids.push_back(sequence.sequence_id());
  EXPECT_THAT(ids, ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(ClientTest, AStreamThatBrokeOffIsReadAgainFromItsStart) {
  sequences_.failures = 1;
  const auto sets = client_->GetSets(1, {4, 5});
  ASSERT_TRUE(sets.ok()) << sets.status();
  ASSERT_EQ(sets->size(), 2u);
  EXPECT_EQ((*sets)[0].layer(), 4);
  EXPECT_EQ((*sets)[1].layer(), 5);
}

TEST_F(ClientTest, ASetInSeveralMessagesIsOne) {
  const auto sets = client_->GetSets(1, {4});
  ASSERT_TRUE(sets.ok()) << sets.status();
  ASSERT_EQ(sets->size(), 1u);
  EXPECT_THAT((*sets)[0].heavy(), ElementsAre(1, 3));
  EXPECT_FALSE((*sets)[0].continued());
  sequences_.lose_first = true;
  EXPECT_EQ(client_->GetSets(1, {4}).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(ClientTest, GetReadsAllPagesOfTheTokens) {
  EXPECT_THAT(client_->Get(1)->tokens(), ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(ClientTest, ReadJoinsChunksWhoseChecksumsMatch) {
  const auto rows = client_->Read({});
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(*rows, "firstsecond");
}

TEST_F(ClientTest, ReadIsDataLossWhenAChecksumDoesNotMatch) {
  pages_.corrupt = true;
  EXPECT_EQ(client_->Read({}).status().code(), absl::StatusCode::kDataLoss);
}

TEST(ClientConnectTest, WantsAnAddress) {
  EXPECT_EQ(Client::Connect({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ClientConnectTest, ATokenDoesNotGoInPlaintextToAnotherMachine) {
  const auto client = Client::Connect({.cache_address = "cache:7700", .security = {.token = "t"}});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("cache:7700"));
}

TEST(ClientConnectTest, AFileOfCertificatesThatIsNotThereIsNamed) {
  const auto client =
      Client::Connect({.worker_address = "w:1", .security = {.ca_file = "/no/such/ca.pem"}});
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("/no/such/ca.pem"));
}

TEST(ClientConnectTest, ACallWithoutItsAddressNamesTheField) {
  const auto client = Client::Connect({.worker_address = "127.0.0.1:1"});
  ASSERT_TRUE(client.ok());
  const absl::Status status = (*client)->Get(1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cache_address"));
}

}  // namespace
}  // namespace heavywater
