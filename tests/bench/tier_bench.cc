// `tier`: pages through the host tier beside plain memcpy and beside a Redis over TCP;
// through the disk tier beside RocksDB as it is; through streams beside gRPC as it is.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "tests/bench/lower_tier_peers.h"
#include "tests/bench/options.h"
#include "tests/bench/stream_case.h"
#include "tests/bench/tier_case.h"
#include "tests/bench/timing.h"

namespace heavywater {
namespace {

constexpr int64_t kPageBytes[] = {64 << 10, 256 << 10, 1 << 20};
constexpr int64_t kQuickPageBytes[] = {64 << 10};
// The disk tier's buffers hold a sixteenth of it: what is timed has left them.
constexpr int64_t kDiskBytes = 64 << 20;

// Others do part of the work, so this is no CPU time.
double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Contender {
  std::function<void(int round)> prepare;  // not timed
  std::function<absl::Status(int round)> run;
};

// Median seconds of each; they take turns.
absl::StatusOr<std::vector<double>> Medians(int rounds, const std::vector<Contender>& contenders) {
  std::vector<std::vector<double>> seconds(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      if (contenders[i].prepare) contenders[i].prepare(round);
      const double start = WallSeconds();
      HW_RETURN_IF_ERROR(contenders[i].run(round));
      seconds[i].push_back(WallSeconds() - start);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of_one : seconds) {
    std::nth_element(of_one.begin(), of_one.begin() + rounds / 2, of_one.end());
    medians.push_back(of_one[rounds / 2]);
  }
  return medians;
}

BenchJson Row(const char* tier, const char* op, int64_t bytes, bool crc) {
  return {{"tier", tier},         {"op", op},
          {"bytes", bytes},       {"crc", crc},
          {"vs_memcpy", nullptr}, {"vs_redis", nullptr},
          {"vs_peer", nullptr}};
}

absl::Status CheckSame(std::span<const std::byte> got, std::span<const std::byte> want) {
  if (std::equal(got.begin(), got.end(), want.begin(), want.end())) return absl::OkStatus();
  return absl::InternalError("a page did not come back as it was put");
}

// Pages of a sequence have one size.
PageKey KeyOf(int page, int64_t bytes) {
  return {.sequence = static_cast<SequenceId>(bytes), .page = page};
}

absl::Status PutPage(LowerTier& tier, int page, std::span<const std::byte> bytes, uint32_t crc) {
  const PageCopy copy = {KeyOf(page, static_cast<int64_t>(bytes.size())), bytes, crc};
  return tier.Put({&copy, 1}).at(0);
}

// Everything that one size is timed with.
struct Pages {
  int64_t bytes = 0;
  int rounds = 0;
  std::vector<std::vector<std::byte>> source;  // by round
  std::vector<uint32_t> crcs;
  std::vector<std::byte> target;
};

Pages MakePages(int64_t bytes, int rounds) {
  Pages pages{.bytes = bytes, .rounds = rounds, .source = {}, .crcs = {}, .target = {}};
  for (int round = 0; round < rounds; ++round) {
    pages.source.push_back(BenchBytes(bytes, static_cast<uint32_t>(round)));
    pages.crcs.push_back(Crc32c(pages.source.back()));
  }
  pages.target.resize(bytes);
  return pages;
}

// `crc`: with a checksum that is computed for it, as the host tier computes its own.
absl::Status PutTogether(LowerTier& tier, const Pages& pages, bool crc, int first, int count) {
  std::vector<PageCopy> copies;
  for (int page = first; page < first + count; ++page) {
    const int from = page % pages.rounds;
    copies.push_back({KeyOf(page, pages.bytes), pages.source[from],
                      crc ? Crc32c(pages.source[from]) : pages.crcs[from]});
  }
  for (const absl::Status& put : tier.Put(copies)) HW_RETURN_IF_ERROR(put);
  return absl::OkStatus();
}

// What is timed at once in the host tier: ranks demote and recall pages by the dozen.
constexpr int64_t kBatchBytes = 1 << 20;

// One size, checked or not: put and get, each with memcpy of the same bytes (between
// buffers that are as cold) and with Redis, where there is one.
absl::Status HostRows(Pages& pages, bool crc, LowerTier* redis, BenchJson& rows) {
  const int batch =
      std::clamp(static_cast<int>(kBatchBytes / pages.bytes), 1, pages.rounds);  // sources differ
  HW_ASSIGN_OR_RETURN(const auto host,
                      HostTierCase::Create(pages.bytes, pages.rounds * batch, crc));
  const auto bytes = static_cast<size_t>(host->bytes());
  std::vector<std::byte> memory(batch * pages.target.size());
  const auto target = [&](int page) {
    return std::span(memory).subspan((page % batch) * pages.target.size(), bytes);
  };
  const auto source = [&](int page) {
    return std::span(pages.source[page % pages.rounds]).first(bytes);
  };
  const auto flush = [&](int round) {
    for (int page = round * batch; page < (round + 1) * batch; ++page) {
      FlushFromCaches(source(page));
      FlushFromCaches(host->Memory(page));
      FlushFromCaches(target(page));
    }
  };
  const auto each = [&](auto of_page) -> Contender {
    return {flush, [batch, of_page](int round) -> absl::Status {
              for (int page = round * batch; page < (round + 1) * batch; ++page) {
                HW_RETURN_IF_ERROR(of_page(page));
              }
              return absl::OkStatus();
            }};
  };
  const Contender copy = each([&](int page) {
    std::memcpy(target(page).data(), source(page).data(), bytes);
    return absl::OkStatus();
  });
  std::vector<Contender> put = {each([&](int page) { return host->Put(page, source(page)); }),
                                copy};
  std::vector<Contender> get = {each([&](int page) { return host->Get(page, target(page)); }),
                                copy};
  if (redis != nullptr) {
    // Pages that are new to it, in memory that is not.
    for (int round = 0; round < pages.rounds; ++round) {
      HW_RETURN_IF_ERROR(PutTogether(*redis, pages, crc, round * batch, batch));
    }
    HW_RETURN_IF_ERROR(redis->EraseSequence(KeyOf(0, pages.bytes).sequence));
    put.push_back(
        {flush, [&](int round) { return PutTogether(*redis, pages, crc, round * batch, batch); }});
    get.push_back(each([&](int page) {
      const auto whole =
          std::span(memory).subspan((page % batch) * pages.target.size(), pages.target.size());
      return redis->Get(KeyOf(page, pages.bytes), whole).status();
    }));
  }
  HW_ASSIGN_OR_RETURN(const std::vector<double> put_seconds, Medians(pages.rounds, put));
  HW_RETURN_IF_ERROR(host->MakeReadable());
  HW_ASSIGN_OR_RETURN(const std::vector<double> get_seconds, Medians(pages.rounds, get));
  for (int page = 0; page < pages.rounds * batch; ++page) {
    HW_RETURN_IF_ERROR(host->Get(page, target(page)));
    HW_RETURN_IF_ERROR(CheckSame(target(page), source(page)));
  }
  for (const auto& [op, seconds] : {std::pair("put", put_seconds), std::pair("get", get_seconds)}) {
    BenchJson row = Row("host", op, pages.bytes, crc);
    row["vs_memcpy"] = seconds[1] / seconds[0];
    if (redis != nullptr) row["vs_redis"] = seconds[2] / seconds[0];
    rows.push_back(std::move(row));
  }
  return absl::OkStatus();
}

absl::Status DiskRows(Pages& pages, BenchJson& rows) {
  const std::unique_ptr<LowerTier> disk = OpenBenchDisk(kDiskBytes);
  const std::unique_ptr<BareRocksDb> bare = BareRocksDb::Open(kDiskBytes);
  std::vector<double> put(2);
  std::vector<double> get(2);
  const bool is_there = disk != nullptr && bare != nullptr;
  if (is_there) {
    // More than the buffers hold, again and again the same pages under other keys.
    const int count = static_cast<int>(kDiskBytes / 2 / pages.bytes);
    const auto page_of = [&](int number) { return number % pages.rounds; };
    HW_ASSIGN_OR_RETURN(put, Medians(count, {{nullptr,
                                              [&](int i) {
                                                return PutPage(*disk, i, pages.source[page_of(i)],
                                                               pages.crcs[page_of(i)]);
                                              }},
                                             {nullptr, [&](int i) {
                                                return bare->Put(
                                                    absl::StrCat("page-", i, "-of-the-bare-one"),
                                                    pages.source[page_of(i)]);
                                              }}}));
    HW_ASSIGN_OR_RETURN(
        get, Medians(count / 2, {{nullptr,
                                  [&](int i) {
                                    HW_RETURN_IF_ERROR(
                                        disk->Get(KeyOf(i, pages.bytes), pages.target).status());
                                    return absl::OkStatus();
                                  }},
                                 {nullptr, [&](int i) {
                                    return bare->Get(absl::StrCat("page-", i, "-of-the-bare-one"),
                                                     pages.target);
                                  }}}));
    HW_RETURN_IF_ERROR(disk->Get(KeyOf(1, pages.bytes), pages.target).status());
    HW_RETURN_IF_ERROR(CheckSame(pages.target, pages.source[page_of(1)]));
  }
  for (const auto& [op, seconds] : {std::pair("put", put), std::pair("get", get)}) {
    BenchJson row = Row("disk", op, pages.bytes, true);
    if (is_there) row["vs_peer"] = seconds[1] / seconds[0];
    rows.push_back(std::move(row));
  }
  return absl::OkStatus();
}

// Streams of the cache service beside gRPC as it is: the same messages, sizes and chunks over
// loopback. Puts are of all pages at once; gets of one after the other.
absl::Status StreamRows(Pages& pages, BenchJson& rows) {
  const auto count = static_cast<int>(pages.source.size());
  HW_ASSIGN_OR_RETURN(const auto service, MakeServiceStream(pages.bytes, count));
  if (service == nullptr) return absl::OkStatus();  // a build without servers
  HW_ASSIGN_OR_RETURN(const auto bare, MakeBareStream(pages.bytes, count));
  HW_ASSIGN_OR_RETURN(
      const std::vector<double> put,
      Medians(pages.rounds, {{nullptr, [&](int) { return service->Put(pages.source); }},
                             {nullptr, [&](int) { return bare->Put(pages.source); }}}));
  HW_RETURN_IF_ERROR(service->MakeReadable());
  const auto get_all = [&](StreamCase& stream) -> absl::Status {
    for (int page = 0; page < count; ++page) {
      HW_RETURN_IF_ERROR(stream.Get(page, pages.target));
    }
    return absl::OkStatus();
  };
  HW_ASSIGN_OR_RETURN(const std::vector<double> get,
                      Medians(pages.rounds, {{nullptr, [&](int) { return get_all(*service); }},
                                             {nullptr, [&](int) { return get_all(*bare); }}}));
  for (StreamCase* const stream : {service.get(), bare.get()}) {
    for (int page = 0; page < count; ++page) {
      HW_RETURN_IF_ERROR(stream->Get(page, pages.target));
      HW_RETURN_IF_ERROR(CheckSame(pages.target, pages.source[page]));
    }
  }
  for (const auto& [op, seconds] : {std::pair("put", put), std::pair("get", get)}) {
    BenchJson row = Row("stream", op, pages.bytes, true);
    row["vs_peer"] = seconds[1] / seconds[0];
    rows.push_back(std::move(row));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BenchJson> RunTierBench(const BenchOptions& options) {
  BenchJson report = {{"rows", BenchJson::array()}};
  const std::unique_ptr<LowerTier> redis = StartBenchRedis();
  const std::span<const int64_t> sizes = options.quick ? std::span<const int64_t>(kQuickPageBytes)
                                                       : std::span<const int64_t>(kPageBytes);
  for (const int64_t bytes : sizes) {
    Pages pages = MakePages(bytes, options.quick ? 5 : 31);
    for (const bool crc : {false, true}) {
      HW_RETURN_IF_ERROR(HostRows(pages, crc, redis.get(), report["rows"]));
    }
    HW_RETURN_IF_ERROR(DiskRows(pages, report["rows"]));
    HW_RETURN_IF_ERROR(StreamRows(pages, report["rows"]));
  }
  return report;
}

}  // namespace heavywater
