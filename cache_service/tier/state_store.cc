#include "cache_service/tier/state_store.h"

#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"

namespace heavywater {
namespace {

constexpr size_t kIdBytes = sizeof(uint64_t);

// Big endian: keys sort by their numbers.
void AppendId(uint64_t id, std::string* key) {
  for (int shift = 56; shift >= 0; shift -= 8) key->push_back(static_cast<char>(id >> shift));
}

uint64_t ReadId(std::string_view bytes) {
  uint64_t id = 0;
  for (size_t i = 0; i < kIdBytes; ++i) id = id << 8 | static_cast<uint8_t>(bytes[i]);
  return id;
}

uint32_t CrcOf(std::string_view bytes) {
  return Crc32c(std::as_bytes(std::span<const char>(bytes.data(), bytes.size())));
}

}  // namespace

std::string StateKey(StateKind kind) { return {static_cast<char>(kind)}; }

std::string StateKey(StateKind kind, std::string_view name) {
  std::string key = StateKey(kind);
  key.append(name);
  return key;
}

std::string StateKey(StateKind kind, uint64_t id) {
  std::string key = StateKey(kind);
  AppendId(id, &key);
  return key;
}

std::string StateKey(StateKind kind, uint64_t id, uint64_t number) {
  std::string key = StateKey(kind, id);
  AppendId(number, &key);
  return key;
}

absl::StatusOr<StateId> ParseStateKey(std::string_view key) {
  StateId parsed;
  if (key.size() == 1 + kIdBytes || key.size() == 1 + 2 * kIdBytes) {
    parsed.id = ReadId(key.substr(1));
    if (key.size() > 1 + kIdBytes) parsed.number = ReadId(key.substr(1 + kIdBytes));
    return parsed;
  }
  return absl::DataLossError(absl::StrCat("a state record's key has ", key.size(), " bytes"));
}

void RecordWriter::Add(int64_t value) {
  char bytes[sizeof(value)];
  std::memcpy(bytes, &value, sizeof(value));
  bytes_.append(bytes, sizeof(value));
}

std::string RecordWriter::Take() {
  const uint32_t crc = CrcOf(bytes_);
  char bytes[sizeof(crc)];
  std::memcpy(bytes, &crc, sizeof(crc));
  bytes_.append(bytes, sizeof(crc));
  return std::exchange(bytes_, {});
}

RecordReader::RecordReader(std::string_view record) {
  uint32_t crc = 0;
  failed_ = record.size() < sizeof(crc);
  if (failed_) return;
  left_ = record.substr(0, record.size() - sizeof(crc));
  std::memcpy(&crc, record.data() + left_.size(), sizeof(crc));
  failed_ = crc != CrcOf(left_);
}

int64_t RecordReader::Next() {
  int64_t value = 0;
  failed_ = failed_ || left_.size() < sizeof(value);
  if (failed_) return 0;
  std::memcpy(&value, left_.data(), sizeof(value));
  left_.remove_prefix(sizeof(value));
  return value;
}

int64_t RecordReader::NextCount(int64_t values) {
  const int64_t count = Next();
  const auto limit = static_cast<int64_t>(left_.size() / sizeof(int64_t)) / values;
  failed_ = failed_ || count < 0 || count > limit;
  return failed_ ? 0 : count;
}

absl::Status RecordReader::Finish() const {
  if (!failed_ && left_.empty()) return absl::OkStatus();
  return absl::DataLossError("a state record is damaged");
}

}  // namespace heavywater
