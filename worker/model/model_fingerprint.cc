#include "worker/model/model_fingerprint.h"

#include <algorithm>
#include <cstdint>

#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr size_t kSampleBytes = 1024;

class Fnv1a {
 public:
  void Add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      hash_ = (hash_ ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
    }
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

void AddSamples(std::span<const std::byte> data, Fnv1a& hash) {
  const size_t sample = std::min(kSampleBytes, data.size());
  const size_t last = data.size() - sample;
  for (const size_t offset : {size_t{0}, last / 2, last}) hash.Add(data.subspan(offset, sample));
}

}  // namespace

std::string ModelFingerprint(const GgufFile& file) {
  Fnv1a hash;
  hash.Add(file.header());
  const int64_t file_bytes = file.file_bytes();
  hash.Add(std::as_bytes(std::span(&file_bytes, 1)));
  for (const std::string_view name : file.TensorNames()) {
    AddSamples(file.FindTensor(name)->data, hash);
  }
  return Message("gguf-", absl::Hex(hash.hash(), absl::kZeroPad16));
}

}  // namespace heavywater
