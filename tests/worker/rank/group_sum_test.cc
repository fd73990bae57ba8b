#include "worker/rank/group_sum.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

TEST(AgreeOnStatusTest, EveryRankLearnsTheFirstFailure) {
  const auto ranks = CreateLocalGroup(3, absl::Seconds(20));
  const std::vector<absl::Status> here = {absl::OkStatus(), absl::NotFoundError("no such thing"),
                                          absl::OkStatus()};
  std::vector<absl::Status> agreed(3);
  std::vector<absl::Status> collective(3);
  const auto agree = [&](size_t rank) {
    const std::unique_ptr<Backend> backend = CreateReferenceBackend();
    Stream stream;
    collective[rank] = AgreeOnStatus(here[rank], *backend, *ranks[rank], stream, agreed[rank]);
  };
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 3; ++rank) threads.emplace_back(agree, rank);
  for (std::thread& thread : threads) thread.join();
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(collective[rank].ok()) << collective[rank];
    EXPECT_EQ(agreed[rank].code(), absl::StatusCode::kNotFound) << rank;
  }
  EXPECT_EQ(agreed[1], here[1]);
  EXPECT_THAT(std::string(agreed[0].message()), HasSubstr("rank 1 failed"));
}

TEST(AgreeOnStatusTest, AGroupThatIsGoneHasAgreedOnNothing) {
  const auto ranks = CreateLocalGroup(2, absl::Seconds(20));
  ranks[1]->Abort(absl::UnavailableError("killed by the test"));
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  Stream stream;
  absl::Status agreed;
  EXPECT_EQ(AgreeOnStatus(absl::OkStatus(), *backend, *ranks[0], stream, agreed).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(agreed.ok());
}

}  // namespace
}  // namespace heavywater
