#include "worker/model/model_fingerprint.h"

#include <algorithm>

#include "worker/model/gguf_file.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr size_t kSampleBytes = 1024;

}  // namespace

void FingerprintHash::Add(std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    hash_ = (hash_ ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
  }
}

void FingerprintHash::Add(int64_t number) { Add(std::as_bytes(std::span(&number, 1))); }

void FingerprintHash::AddSamples(std::span<const std::byte> data) {
  const size_t sample = std::min(kSampleBytes, data.size());
  const size_t last = data.size() - sample;
  for (const size_t offset : {size_t{0}, last / 2, last}) Add(data.subspan(offset, sample));
}

std::string FingerprintHash::Name(std::string_view prefix) const {
  return Message(prefix, absl::Hex(hash_, absl::kZeroPad16));
}

std::string ModelFingerprint(const GgufFile& file) {
  FingerprintHash hash;
  hash.Add(file.header());
  hash.Add(file.file_bytes());
  for (const std::string_view name : file.TensorNames()) {
    hash.AddSamples(file.FindTensor(name)->data);
  }
  return hash.Name("gguf-");
}

}  // namespace heavywater
