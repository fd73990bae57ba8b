// heavywater-sim: many seeds of the simulated system, one after another.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/sim/system/system_simulation.h"

namespace heavywater {
namespace {

constexpr char kUsage[] =
    "heavywater-sim [--runs N] [--steps N] [--first-seed S] [--lines] [--json]\n"
    "  Simulated systems (ranks, cache service, tiers, clients, faults), a seed each.\n"
    "  --runs 100 --steps 500 --first-seed 0: as given where not said otherwise.\n"
    "  --lines: each event of each run on standard error, to look into one seed.\n"
    "  --json: one object on standard output; progress goes to standard error.\n"
    "Ends with 1 where a run fails, naming its seed; with 2 where it cannot be called so.\n";

struct Options {
  int64_t runs = 100;
  int64_t steps = 500;
  int64_t first_seed = 0;
  bool lines = false;
  bool json = false;
};

struct Failure {
  int64_t seed = 0;
  std::string wrong;
};

bool Number(int argc, char** argv, int* i, int64_t least, int64_t* value) {
  if (*i + 1 < argc && absl::SimpleAtoi(argv[*i + 1], value) && *value >= least) {
    ++*i;
    return true;
  }
  std::fprintf(stderr, "%s wants a number of at least %lld\n%s", argv[*i],
               static_cast<long long>(least), kUsage);
  return false;
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    bool good = true;
    if (name == "--runs") {
      good = Number(argc, argv, &i, 1, &options->runs);
    } else if (name == "--steps") {
      good = Number(argc, argv, &i, 1, &options->steps);
    } else if (name == "--first-seed") {
      good = Number(argc, argv, &i, 0, &options->first_seed);
    } else if (name == "--lines") {
      options->lines = true;
    } else if (name == "--json") {
      options->json = true;
    } else {
      std::fputs(kUsage, name == "--help" ? stdout : stderr);
      if (name == "--help") std::exit(0);
      good = false;
    }
    if (!good) return false;
  }
  return true;
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') quoted += '\\';
    quoted += letter == '\n' || letter == '\t' ? ' ' : letter;
  }
  return quoted + "\"";
}

void PrintJson(const Options& options, int64_t runs, double seconds,
               const std::map<std::string, int64_t, std::less<>>& counts,
               const std::vector<Failure>& failures) {
  std::string events;
  for (const auto& [kind, count] : counts) {
    absl::StrAppend(&events, events.empty() ? "" : ",", Quoted(kind), ":", count);
  }
  std::string failed;
  for (const Failure& failure : failures) {
    absl::StrAppend(&failed, failed.empty() ? "" : ",", "{\"seed\":", failure.seed,
                    ",\"wrong\":", Quoted(failure.wrong), "}");
  }
  std::printf(
      "{\"runs\":%lld,\"steps\":%lld,\"first_seed\":%lld,\"seconds\":%.1f,"
      "\"events\":{%s},\"failures\":[%s]}\n",
      static_cast<long long>(runs), static_cast<long long>(options.steps),
      static_cast<long long>(options.first_seed), seconds, events.c_str(), failed.c_str());
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, &options)) return 2;
  std::map<std::string, int64_t, std::less<>> counts;
  std::vector<Failure> failures;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double told = 0;
  for (int64_t run = 0; run < options.runs; ++run) {
    const int64_t seed = options.first_seed + run;
    SystemSimulation simulation(static_cast<uint64_t>(seed), options.lines ? stderr : nullptr);
    const std::string wrong = simulation.Run(static_cast<int>(options.steps));
    for (const auto& [kind, count] : simulation.trace().counts()) counts[kind] += count;
    if (!wrong.empty()) {
      failures.push_back({seed, wrong});
      std::fprintf(stderr, "seed %lld: %s\n", static_cast<long long>(seed), wrong.c_str());
    }
    if (seconds() - told < 10 && run + 1 < options.runs) continue;
    told = seconds();
    std::fprintf(stderr, "%lld of %lld runs, %zu failed, %.0f s\n", static_cast<long long>(run + 1),
                 static_cast<long long>(options.runs), failures.size(), told);
  }
  if (options.json) {
    PrintJson(options, options.runs, seconds(), counts, failures);
  } else {
    for (const auto& [kind, count] : counts) {
      std::printf("%10lld  %s\n", static_cast<long long>(count), kind.c_str());
    }
  }
  return failures.empty() ? 0 : 1;
}

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) { return heavywater::Main(argc, argv); }
