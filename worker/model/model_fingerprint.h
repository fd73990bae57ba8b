// A short name for "the same weights": ranks compare it when they form a
// group, and stored KV is used only under the same one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace heavywater {

class GgufFile;

// FNV-1a, 64 bits.
class FingerprintHash {
 public:
  void Add(std::span<const std::byte> bytes);
  void Add(int64_t number);
  // Three samples of 1 KiB: start, middle and end.
  void AddSamples(std::span<const std::byte> data);
  // `prefix`, then 16 hex digits.
  std::string Name(std::string_view prefix) const;

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// "gguf-" and 16 hex digits: FNV-1a (64 bits) over the header (all metadata and
// the tensor table), the file's size, and three samples of 1 KiB of every
// tensor (its start, middle and end). Milliseconds, whatever the model's size.
// It tells models, revisions, fine-tunes and quantisations apart; it is no
// defence against somebody who edits single weights, nor against bit rot.
std::string ModelFingerprint(const GgufFile& file);

}  // namespace heavywater
