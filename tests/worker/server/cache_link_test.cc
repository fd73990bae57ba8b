// Workers and a real cache service.
#include "worker/server/cache_link.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"
#include "worker/server/group_rendezvous.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

v1::GenerateRequest Bounded(int prompt_tokens, int new_tokens, int interval = 1) {
  v1::GenerateRequest request = MakeRequest(SomeTokens(prompt_tokens, 3), new_tokens);
  v1::PolicyOptions& policy = *request.mutable_policy();
  policy.set_policy("snapkv_h2o");
  policy.set_heavy_tokens(8);
  policy.set_recent_tokens(6);
  policy.set_sink_tokens(2);
  policy.set_plan_interval_steps(interval);
  return request;
}

std::set<int64_t> FromRanges(const google::protobuf::RepeatedField<int64_t>& flat) {
  std::set<int64_t> positions;
  for (int i = 0; i + 1 < flat.size(); i += 2) {
    for (int64_t position = flat[i]; position < flat[i + 1]; ++position) positions.insert(position);
  }
  return positions;
}

// Every seen position is in exactly one part.
void ExpectWhole(const v1::SequenceSet& set, int64_t tokens_seen) {
  std::multiset<int64_t> all(set.sinks().begin(), set.sinks().end());
  all.insert(set.heavy().begin(), set.heavy().end());
  all.insert(set.recent().begin(), set.recent().end());
  const std::set<int64_t> demoted = FromRanges(set.demoted_ranges());
  all.insert(demoted.begin(), demoted.end());
  const std::set<int64_t> dropped = FromRanges(set.dropped_ranges());
  all.insert(dropped.begin(), dropped.end());
  EXPECT_EQ(static_cast<int64_t>(all.size()), tokens_seen);
  int64_t next = 0;
  for (int64_t position : all) EXPECT_EQ(position, next++);
}

void ExpectAllKept(const v1::SequenceSet& set, int64_t tokens_seen) {
  ExpectWhole(set, tokens_seen);
  EXPECT_TRUE(set.dropped_ranges().empty());
}

// A rank's dump: rows of every layer, head and position.
class Dump {
 public:
  Dump(SequenceId sequence, int rank) {
    const std::string stem = absl::StrCat(::testing::TempDir(), "/seq", sequence, "_rank", rank);
    // Ranks dump behind the answer.
    for (int tries = 0; tries < 1000 && !std::filesystem::exists(stem + ".json"); ++tries) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    std::ifstream json_file(stem + ".json");
    json = nlohmann::json::parse(json_file);
    std::ifstream kv_file(stem + ".kv", std::ios::binary);
    std::stringstream rows;
    rows << kv_file.rdbuf();
    kv = rows.str();
  }
  std::string Row(int layer, int head, int64_t position) const {
    const auto bytes = json["row_bytes"].get<size_t>();
    const auto seen = json["tokens_seen"].get<size_t>();
    const size_t column = layer * json["num_kv_heads"].get<size_t>() + head;
    return kv.substr((column * seen + position) * bytes, bytes);
  }

  nlohmann::json json;
  std::string kv;
};

class CacheLinkTest : public ::testing::Test {
 protected:
  ServerTestGroup::Configure WithCache(bool disable_slab = false) {
    return [this, disable_slab](v1::WorkerConfig& config) {
      config.set_cache_address(service_.address());
      config.set_disable_slab(disable_slab);
      config.set_dump_dir(::testing::TempDir());
    };
  }

  TestCacheService service_;
  TinyModel model_;
};

TEST_F(CacheLinkTest, EverySeenPositionIsInASetAndReadsBackWhetherMappedOrStreamed) {
  std::map<bool, std::map<std::string, std::string>> rows;
  for (bool stream : {false, true}) {
    ServerTestGroup group(model_, 3, WithCache(stream));
    group.Start();
    const Generated generated = group.Generate(Bounded(30, 20));
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_EQ(generated.summary.counts().tokens_dropped(), 0);
    EXPECT_EQ(generated.summary.counts().tokens_demoted(), 49 - 14);
    const SequenceId sequence = generated.messages[0].sequence_id();
    const auto sets = service_.SetsAt(sequence, generated.summary.plan());
    ASSERT_THAT(sets, SizeIs(kTinyLayers));
    for (const v1::SequenceSet& set : sets) {
      ExpectAllKept(set, 49);
      for (int64_t position : FromRanges(set.demoted_ranges())) {
        for (int head = 0; head < kTinyKvHeads; ++head) {
          const auto row = service_.ReadRow(sequence, set.layer(), head, position);
          ASSERT_TRUE(row.ok()) << row.status();
          rows[stream][absl::StrCat(set.layer(), "/", head, "/", position)] = *row;
        }
      }
    }
    EXPECT_EQ(service_.Get(sequence)->tokens_size(), 49);
  }
  EXPECT_FALSE(rows[false].empty());
  EXPECT_EQ(rows[false], rows[true]);
}

TEST_F(CacheLinkTest, TheDumpHoldsWhatTheServiceSays) {
  ServerTestGroup group(model_, 3, WithCache());
  group.Start();
  const Generated generated = group.Generate(Bounded(30, 20));
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  const SequenceId sequence = generated.messages[0].sequence_id();
  const auto sets = service_.SetsAt(sequence, generated.summary.plan());
  ASSERT_THAT(sets, SizeIs(kTinyLayers));
  for (int rank = 0; rank < 3; ++rank) {
    const Dump dump(sequence, rank);
    const nlohmann::json& json = dump.json;
    EXPECT_EQ(json["plan"], generated.summary.plan());
    EXPECT_EQ(json["tokens_seen"], 49);
    EXPECT_EQ(json["first_kv_head"], rank);
    for (const auto& set : json["sets"]) {
      const v1::SequenceSet& reported = sets.at(set["layer"].get<size_t>());
      std::set<int64_t> resident(reported.sinks().begin(), reported.sinks().end());
      resident.insert(reported.heavy().begin(), reported.heavy().end());
      resident.insert(reported.recent().begin(), reported.recent().end());
      EXPECT_EQ(set["positions"].get<std::set<int64_t>>(), resident);
    }
    ASSERT_EQ(dump.kv.size(), kTinyLayers * 49 * json["row_bytes"].get<size_t>());
    for (int layer = 0; layer < kTinyLayers; ++layer) {
      EXPECT_EQ(*service_.ReadRow(sequence, layer, rank, 7), dump.Row(layer, 0, 7));
    }
  }
}

TEST_F(CacheLinkTest, ASequenceThatEndsBetweenPlansReportsItsLastState) {
  ServerTestGroup group(model_, 3, WithCache());
  group.Start();
  for (const int interval : {1, 5}) {
    const Generated generated = group.Generate(Bounded(30, 20, interval));
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    const auto sets =
        service_.SetsAt(generated.messages[0].sequence_id(), generated.summary.plan());
    ASSERT_THAT(sets, SizeIs(kTinyLayers));
    for (const v1::SequenceSet& set : sets) ExpectAllKept(set, 49);
  }
  v1::GenerateRequest full = MakeRequest(SomeTokens(9, 1), 30);
  full.mutable_policy()->set_policy("full");
  const Generated generated = group.Generate(full);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  EXPECT_EQ(generated.summary.plan(), 2);
  const auto sets = service_.SetsAt(generated.messages[0].sequence_id(), 2);
  ASSERT_THAT(sets, SizeIs(kTinyLayers));
  for (const v1::SequenceSet& set : sets) ExpectAllKept(set, 38);
}

TEST_F(CacheLinkTest, AnOutageStopsAndChangesNothingAndNewSequencesWaitForTheReturn) {
  for (bool stream : {false, true}) {
    ServerTestGroup group(model_, 3, WithCache(stream));
    group.Start();
    const Generated undisturbed = group.Generate(Bounded(10, 54));
    ASSERT_TRUE(undisturbed.status.ok()) << undisturbed.status;
    const auto generation = group.engine().Start(Bounded(10, 54));
    ASSERT_TRUE(generation.ok()) << generation.status();
    ASSERT_TRUE((*generation)->responses.Pop(absl::Seconds(10)).has_value());
    service_.Stop();
    Generated disturbed = ServerTestGroup::ReadAll(**generation);
    EXPECT_TRUE(disturbed.status.ok()) << disturbed.status;
    const std::vector<int32_t> all = undisturbed.tokens();
    EXPECT_EQ(disturbed.tokens(), std::vector<int32_t>(all.begin() + 1, all.end()));
    const auto refused = group.engine().Start(Bounded(10, 4));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable) << refused.status();
    service_.Start();
    Generated again;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    do {
      again = group.Generate(Bounded(10, 54));
    } while (absl::IsUnavailable(again.status) && absl::Now() < deadline);
    ASSERT_TRUE(again.status.ok()) << again.status;
    EXPECT_EQ(again.tokens(), all);
    const auto sets = service_.SetsAt(again.messages[0].sequence_id(), again.summary.plan());
    for (const v1::SequenceSet& set : sets) ExpectAllKept(set, 63);
  }
}

TEST_F(CacheLinkTest, ASequenceEndedOrLostAtTheServiceGoesOnForItsClientAndIsKeptNowhere) {
  const Generated undisturbed = [&] {
    ServerTestGroup other(model_, 1);
    other.Start();
    return other.Generate(Bounded(10, 54));
  }();
  for (const bool restart : {false, true}) {
    for (const bool stream : {false, true}) {
      ServerTestGroup group(model_, 1, WithCache(stream));
      const auto generation = group.engine().Start(Bounded(10, 54));
      ASSERT_TRUE(generation.ok()) << generation.status();
      for (int round = 0; round < 30; ++round) ASSERT_TRUE(group.scheduler().RunOnce().ok());
      if (restart) {
        service_.Stop();
        service_.Start();
      } else {
        ASSERT_TRUE(service_.Close((*generation)->sequence).ok());
      }
      absl::SleepFor(absl::Milliseconds(restart ? 3000 : 1500));  // heartbeats hear of it
      group.Start();
      const Generated generated = ServerTestGroup::ReadAll(**generation);
      EXPECT_TRUE(generated.status.ok()) << generated.status;
      EXPECT_EQ(generated.tokens(), undisturbed.tokens());
      const v1::SequenceCounts& counts = generated.summary.counts();
      EXPECT_EQ(counts.tokens_demoted(), 0) << "restart " << restart << ", stream " << stream;
      EXPECT_EQ(counts.tokens_dropped(), 63 - 14);
      EXPECT_EQ(generated.summary.host_bytes(), 0);
      // Some had been demoted before.
      EXPECT_GT(generated.messages[20].counts().tokens_demoted(), 0);
      EXPECT_EQ(generated.messages.back().counts().tokens_demoted(), 0);
    }
  }
}

TEST_F(CacheLinkTest, AFullHostTierStopsTheSequenceOrDropsPositions) {
  for (const char* on_full : {"stop", "drop"}) {
    service_.Stop();
    service_.config().set_host_bytes(1 << 16);  // 16 pages: a page of this model takes one unit
    service_.Start();
    ServerTestGroup group(model_, 1, [&](v1::WorkerConfig& config) {
      WithCache()(config);
      config.set_on_host_full(on_full);
    });
    group.Start();
    const Generated generated = group.Generate(Bounded(4, 56));
    if (std::string(on_full) == "stop") {
      EXPECT_EQ(generated.status.code(), absl::StatusCode::kResourceExhausted) << generated.status;
    } else {
      ASSERT_TRUE(generated.status.ok()) << generated.status;
      EXPECT_GT(generated.summary.counts().tokens_dropped(), 0);
      EXPECT_EQ(generated.summary.counts().tokens_demoted() +
                    generated.summary.counts().tokens_dropped() +
                    generated.summary.counts().tokens_resident(),
                59);
    }
  }
}

TEST_F(CacheLinkTest, APageThatWasGivenUpStaysAMissWhenThereIsRoomAgain) {
  for (const bool stream : {false, true}) {
    service_.Stop();
    // 8 positions take 6 places, and a sequence takes one more: 19 for the other
    // sequence's 23 positions, which runs a little ahead, and 13 for the first 16
    // of this one. The next 6 are only there once the other one has ended.
    service_.config().set_host_bytes(33 << 12);
    service_.Start();
    ServerTestGroup group(model_, 1, [&](v1::WorkerConfig& config) {
      WithCache(stream)(config);
      config.set_on_host_full("drop");
    });
    const auto other = group.engine().Start(Bounded(4, 20));
    ASSERT_TRUE(other.ok()) << other.status();
    for (int round = 0; round < 3; ++round) ASSERT_TRUE(group.scheduler().RunOnce().ok());
    const auto generation = group.engine().Start(Bounded(4, 56));
    ASSERT_TRUE(generation.ok()) << generation.status();
    for (int tokens = 0; tokens < 19; ++tokens) {  // up to position 22
      std::optional<v1::GenerateResponse> token;
      while (!(token = (*generation)->responses.Pop(absl::ZeroDuration())).has_value()) {
        ASSERT_TRUE(group.scheduler().RunOnce().ok());
      }
    }
    ASSERT_TRUE(service_.Close((*other)->sequence).ok());
    absl::SleepFor(absl::Milliseconds(1000));
    group.Start();
    const Generated generated = ServerTestGroup::ReadAll(**generation);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    const SequenceId sequence = (*generation)->sequence;
    const Dump dump(sequence, 0);
    const auto sets = service_.SetsAt(sequence, generated.summary.plan());
    ASSERT_THAT(sets, SizeIs(kTinyLayers));
    for (const v1::SequenceSet& set : sets) {
      ExpectWhole(set, 59);
      EXPECT_EQ(set.dropped_ranges(0), 16) << "stream " << stream;
      EXPECT_LE(set.dropped_ranges(1), 24);
      const std::set<int64_t> demoted = FromRanges(set.demoted_ranges());
      EXPECT_TRUE(std::any_of(demoted.begin(), demoted.end(), [](int64_t p) { return p > 23; }));
      for (int head = 0; head < kTinyKvHeads; ++head) {
        for (const int64_t position : demoted) {
          const auto row = service_.ReadRow(sequence, set.layer(), head, position);
          ASSERT_TRUE(row.ok()) << row.status();
          EXPECT_EQ(*row, dump.Row(set.layer(), head, position));
        }
        for (const int64_t position : FromRanges(set.dropped_ranges())) {
          const absl::Status miss =
              service_.ReadRow(sequence, set.layer(), head, position).status();
          EXPECT_EQ(miss.code(), absl::StatusCode::kNotFound) << position << ": " << miss;
        }
      }
    }
    const v1::SequenceCounts counts = service_.Get(sequence)->counts();
    EXPECT_EQ(counts.tokens_dropped(), generated.summary.counts().tokens_dropped());
    EXPECT_EQ(counts.tokens_demoted(), generated.summary.counts().tokens_demoted());
  }
}

TEST_F(CacheLinkTest, RanksThatDifferAreRefusedNamingBothValues) {
  const auto join = [&](int rank, const std::string& digest) {
    CacheLinkOptions options{.services = {{service_.address()}}, .rank = rank, .size = 2};
    options.instance = absl::StrCat("rank", rank);
    options.config_digest = digest;
    ServerTestGroup facts_of(model_, 1);
    options.fingerprint = facts_of.facts().fingerprint;
    return options;
  };
  CacheLink first(join(0, "page_tokens 8"));
  CacheLink second(join(1, "page_tokens 16"));
  StopFlag stop;
  absl::Status first_status;
  std::thread thread([&] { first_status = first.Join(stop); });
  const absl::Status second_status = second.Join(stop);
  thread.join();
  for (const absl::Status& status : {first_status, second_status}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("page_tokens 8"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("page_tokens 16"));
  }
}

TEST_F(CacheLinkTest, TheRendezvousPassesValuesAndNamesTheKeyThatDoesNotCome) {
  ServerTestGroup group(model_, 1, WithCache());
  CacheLink& link = *group.worker(0).link();
  GroupRendezvous store(link.service()->channel, link.options().group, link.epoch());
  ASSERT_TRUE(store.Put("a/b", std::string("\0x", 2)).ok());
  const auto value = store.Wait("a/b", absl::Seconds(1));
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ(*value, std::string("\0x", 2));
  const auto missing = store.Wait("never", absl::Milliseconds(100));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("never"));
}

// A rank whose process is new: its own list begins with a service that answers, and the others have
// gone on at another.
TEST_F(CacheLinkTest, ANewProcessFindsItsGroupAtAnotherServiceWithoutWaitingForTheFailOver) {
  TestCacheService other;
  const v1::Fingerprint fingerprint = ServerTestGroup(model_, 1).facts().fingerprint;
  const auto options = [&](int rank, std::vector<CacheAddress> services) {
    return CacheLinkOptions{.services = std::move(services),
                            .failover = absl::Hours(1),
                            .rank = rank,
                            .size = 2,
                            .instance = absl::StrCat("rank", rank),
                            .fingerprint = fingerprint};
  };
  CacheLink there(options(0, {{other.address()}}));
  CacheLink fresh(options(1, {{service_.address()}, {other.address()}}));
  StopFlag stop;
  absl::Status joined;
  std::thread thread([&] { joined = there.Join(stop); });
  EXPECT_EQ(fresh.Join(stop), absl::OkStatus());
  thread.join();
  EXPECT_EQ(joined, absl::OkStatus());
  EXPECT_EQ(fresh.service()->address, other.address());
  EXPECT_EQ(fresh.epoch(), there.epoch());
}

TEST_F(CacheLinkTest, JoiningEndsWhenTold) {
  service_.Stop();
  CacheLink link({.services = {{service_.address()}}});
  StopFlag stop;
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(300));
    stop.Stop();
  });
  EXPECT_EQ(link.Join(stop).code(), absl::StatusCode::kCancelled);
  stopper.join();
}

}  // namespace
}  // namespace heavywater
