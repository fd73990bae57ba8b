// heavywater-bench: how close kernels come to the machine's limits. Results are checked
// before a figure is printed; figures are ratios within one run, caches cold.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "tests/bench/options.h"

namespace heavywater {
namespace {

constexpr const char* kUsage =
    R"(usage: heavywater-bench COMMAND [--backend cpu|cuda] [--model FILE] [--context N] [--json] [--quick]

  attention   a decode step's attention, 32 query and 8 KV heads of size 128 in bf16, contexts
              2k, 8k, 32k: share of the read bandwidth and of the roofline (of the target's own
              instructions), and what scores and the h2o plan add to it
  recall      a step with recall at 20 % of the bytes, 64 picks, contexts 8k, 32k: the scan and
              the whole step beside the full cache's attention
  growth      microseconds of one token in one layer at a budget of 1024 with h2o and snapkv_h2o,
              plan included, recall off, when 2k, 8k and 64k tokens have been seen; caches warm
  decode      tokens a second of a model on one core, contexts 128, 2k, 8k: full, snapkv_h2o at
              20 % and recall, beside llama.cpp where python3 has llama-cpp-python; milliseconds
              a token in each phase of a step
  comm        the collectives of a step of three ranks (threads; local, and Gloo over loopback),
              microseconds; a token of three ranks through Gloo beside one rank, and its share of
              waiting in collectives: wall time
  rpc         tokens a second through Generate of 1 and of 8 sequences at once, beside the same
              steps in this process: a server of one thread, which it starts; wall time
  step        GPUs only: a whole step of one rank with layers of Llama-3-8B's shape and random
              weights, contexts 8k and 32k, beside the time of reading what it must read
  tier        pages of 64 KiB, 256 KiB, 1 MiB through the host tier, as a share of plain memcpy's
              speed and a multiple of a Redis' over TCP; through the disk tier, as a share of
              RocksDB's as it is

On the CPU: one thread; caches are flushed before each step. On a GPU: steps over several layers,
more than its cache holds, replayed as CUDA graphs, beside the bandwidth of a kernel that only
reads. Medians. Wrong results end it with status 1.

  --model FILE  of decode, comm and rpc [HEAVYWATER_MODEL]
  --context N   of decode: this one alone
  --json      prints one JSON object and nothing else on standard output
  --quick     one short context and few rounds: shows that it works, not how fast
  --help      this text
)";

struct Command {
  std::string_view name;
  absl::StatusOr<BenchJson> (*run)(const BenchOptions&);
  absl::StatusOr<BenchJson> (*run_cuda)(const BenchOptions&);
};
// Null: not there.
constexpr Command kCommands[] = {{"attention", RunAttentionBench, RunCudaAttentionBench},
                                 {"recall", RunRecallBench, RunCudaRecallBench},
                                 {"growth", RunGrowthBench, nullptr},
                                 {"step", nullptr, RunCudaStepBench},
                                 {"tier", RunTierBench, nullptr},
                                 {"decode", RunDecodeBench, nullptr},
                                 {"comm", RunCommBench, nullptr},
                                 {"rpc", RunRpcBench, nullptr}};

const Command* FindCommand(std::string_view name) {
  for (const Command& command : kCommands) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

int UsageError(const char* what, std::string_view argument) {
  std::fprintf(stderr, "heavywater-bench: %s %s\n\n%s", what, std::string(argument).c_str(),
               kUsage);
  return 2;
}

// The fields that are not 0, largest first.
std::string ObjectCell(const BenchJson& value) {
  std::vector<std::pair<double, std::string>> fields;
  for (const auto& [field, number] : value.items()) fields.emplace_back(number, field);
  std::sort(fields.rbegin(), fields.rend());
  std::string cell;
  for (const auto& [number, field] : fields) {
    char text[64];
    std::snprintf(text, sizeof(text), "%s%s %.2f", cell.empty() ? "" : ", ", field.c_str(), number);
    if (number >= 0.005) cell += text;
  }
  return cell.empty() ? "-" : cell;
}

std::string Cell(const BenchJson& value) {
  if (value.is_null()) return "-";
  if (value.is_object()) return ObjectCell(value);
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_integer()) return std::to_string(value.get<int64_t>());
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", value.get<double>());
  return text;
}

// Single figures, then a column for each field of the rows.
void PrintTable(const BenchJson& report) {
  for (const auto& [field, value] : report.items()) {
    if (!value.is_array()) std::printf("%s: %s\n", field.c_str(), Cell(value).c_str());
  }
  const BenchJson& rows = report.at("rows");
  for (const auto& [field, value] : rows.at(0).items()) std::printf("%22s", field.c_str());
  std::printf("\n");
  for (const BenchJson& row : rows) {
    for (const auto& [field, value] : row.items()) std::printf("%22s", Cell(value).c_str());
    std::printf("\n");
  }
}

int Run(int argc, char** argv) {
  BenchOptions options;
  if (const char* model = std::getenv("HEAVYWATER_MODEL")) options.model = model;
  bool json = false;
  const Command* command = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    if (argument == "--json") {
      json = true;
    } else if (argument == "--backend" && i + 1 < argc) {
      const std::string_view backend = argv[++i];
      if (backend != "cpu" && backend != "cuda") return UsageError("unknown backend", backend);
      options.cuda = backend == "cuda";
    } else if (argument == "--model" && i + 1 < argc) {
      options.model = argv[++i];
    } else if (argument == "--context" && i + 1 < argc) {
      if (!absl::SimpleAtoi(argv[++i], &options.context) || options.context < 1) {
        return UsageError("want a context of 1 token or more, got", argv[i]);
      }
    } else if (argument == "--quick") {
      options.quick = true;
    } else if (argument.starts_with("-")) {
      return UsageError("unknown option", argument);
    } else if (command != nullptr) {
      return UsageError("one command is enough, got also", argument);
    } else if (command = FindCommand(argument); command == nullptr) {
      return UsageError("unknown command", argument);
    }
  }
  if (command == nullptr) return UsageError("want a command, got", "none");
  if ((options.cuda ? command->run_cuda : command->run) == nullptr) {
    return UsageError(options.cuda ? "no --backend cuda with" : "want --backend cuda with",
                      command->name);
  }
  const absl::StatusOr<BenchJson> report =
      options.cuda ? command->run_cuda(options) : command->run(options);
  if (!report.ok()) {
    std::fprintf(stderr, "heavywater-bench: %s\n", report.status().ToString().c_str());
    return 1;
  }
  if (json) {
    std::printf("%s\n", report->dump().c_str());
  } else {
    PrintTable(*report);
  }
  return 0;
}

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) { return heavywater::Run(argc, argv); }
