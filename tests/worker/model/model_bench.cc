// Not a test: prints how fast one rank of a model decodes and reads a prompt,
// beside what the machine can do, measured in the same run. Attention is left
// out: it is the backend's.
//
//   heavywater-model-bench MODEL.gguf [THREADS]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "tests/worker/model/llama_group.h"
#include "worker/model/gguf_file.h"

namespace heavywater {
namespace {

// Of this thread, so that what else runs on the machine counts less.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best of `rounds` runs of `body`, in seconds of CPU time.
template <class Body>
double BestSeconds(int rounds, const Body& body) {
  double best = 1e30;
  for (int i = 0; i < rounds; ++i) {
    const double start = CpuSeconds();
    body();
    best = std::min(best, CpuSeconds() - start);
  }
  return best;
}

// Sums a quarter of a gigabyte on one core: bytes a second.
double MeasureBandwidth() {
  const std::vector<float> data(size_t{1} << 26, 1.0f);
  volatile float sink = 0;
  const double seconds = BestSeconds(5, [&] {
    float sums[32] = {};  // as many as fit the registers of any machine
    for (size_t i = 0; i < data.size(); i += 32) {
      for (size_t j = 0; j < 32; ++j) sums[j] += data[i + j];
    }
    for (const float sum : sums) sink = sink + sum;
  });
  return static_cast<double>(data.size() * sizeof(float)) / seconds;
}

class Bench {
 public:
  Bench(CpuLlamaRunner& runner, Backend& backend, int64_t tokens)
      : runner_(runner), tokens_(static_cast<size_t>(tokens), 42) {
    const ModelConfig& config = runner.config();
    const auto rows = [&](int64_t width) { return backend.Allocate(tokens * width * 4).value(); };
    for (int64_t i = 0; i < tokens; ++i) positions_.push_back(static_cast<Position>(i));
    hidden_ = rows(config.hidden_size);
    q_ = rows(runner.shard().query_heads.size * config.head_dim);
    k_ = rows(runner.shard().kv_heads.size * config.head_dim);
    v_ = rows(runner.shard().kv_heads.size * config.head_dim);
    logits_ = backend.Allocate(int64_t{config.vocab_size} * 4 * tokens).value();
  }

  absl::Status Step(int64_t logits_tokens) {
    const int64_t width = runner_.hidden_size();
    HW_RETURN_IF_ERROR(runner_.Embed(tokens_, hidden_.As<float>(), stream_));
    for (int layer = 0; layer < runner_.config().num_layers; ++layer) {
      HW_RETURN_IF_ERROR(runner_.ComputeQkv(layer, hidden_.As<float>(), positions_, q_.As<float>(),
                                            k_.As<float>(), v_.As<float>(), stream_));
      HW_RETURN_IF_ERROR(runner_.FinishLayer(layer, q_.As<float>(), hidden_.As<float>(), stream_));
    }
    return runner_.ComputeLogits(hidden_.As<float>(0, logits_tokens * width),
                                 logits_.As<float>(0, logits_tokens * runner_.vocab_size()),
                                 stream_);
  }

 private:
  CpuLlamaRunner& runner_;
  std::vector<int32_t> tokens_;
  std::vector<Position> positions_;
  DeviceBuffer hidden_, q_, k_, v_, logits_;
  Stream stream_;
};

// Of all layers' matrices; each takes two operations a token.
double LayerWeights(const ModelConfig& config) {
  const double hidden = config.hidden_size;
  const double heads = 2.0 * (config.num_query_heads + config.num_kv_heads) * config.head_dim;
  return config.num_layers * hidden * (heads + 3.0 * config.ffn_size);
}

absl::Status Run(const char* path, int threads) {
  const absl::Time start = absl::Now();
  HW_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(path));
  HW_ASSIGN_OR_RETURN(const auto group, LlamaGroup::Create(*file, 1, {.num_threads = threads}));
  CpuLlamaRunner& runner = group->runner(0);
  const double weight_bytes = static_cast<double>(runner.weight_bytes());
  std::printf("loaded %.0f MB of weights in %.2f s\n", weight_bytes / 1e6,
              absl::ToDoubleSeconds(absl::Now() - start));
  const double bandwidth = MeasureBandwidth();
  std::printf("memory reads on one core: %.1f GB/s\n", bandwidth / 1e9);
  for (const int64_t batch : {1, 2, 4, 8, 16, 32}) {
    Bench bench(runner, group->backend(0), batch);
    absl::Status status;
    const double seconds = BestSeconds(7, [&] { status.Update(bench.Step(batch)); });
    HW_RETURN_IF_ERROR(status);
    std::printf("decode, batch %2d: %7.1f tokens/s, %.2f of the memory bandwidth\n",
                static_cast<int>(batch), static_cast<double>(batch) / seconds,
                weight_bytes / seconds / bandwidth);
  }
  for (const int64_t chunk : {128, 512}) {
    Bench bench(runner, group->backend(0), chunk);
    absl::Status status;
    const double seconds = BestSeconds(4, [&] { status.Update(bench.Step(1)); });
    HW_RETURN_IF_ERROR(status);
    const double layers = LayerWeights(runner.config());
    std::printf("prompt, chunk %3d: %7.1f tokens/s, %.0f GFLOP/s in the matrices\n",
                static_cast<int>(chunk), static_cast<double>(chunk) / seconds,
                2 * layers * static_cast<double>(chunk) / seconds / 1e9);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL.gguf [THREADS]\n", argv[0]);
    return 2;
  }
  const absl::Status status = heavywater::Run(argv[1], argc > 2 ? std::atoi(argv[2]) : 1);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
