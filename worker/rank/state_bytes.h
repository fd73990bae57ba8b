// Numbers and arrays one after the other, little-endian as this machine has them: how a
// sequence's state is written down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace heavywater {

class StateWriter {
 public:
  void Number(int64_t value) { Raw(std::as_bytes(std::span(&value, 1))); }
  // The number of its elements, then they.
  template <typename T>
  void Array(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Number(static_cast<int64_t>(values.size()));
    Raw(std::as_bytes(values));
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  void Raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> bytes_;
};

// What does not fit is DATA_LOSS, also where the bytes are anybody's: nothing is allocated that
// the bytes themselves do not fill.
class StateReader {
 public:
  explicit StateReader(std::span<const std::byte> bytes) : left_(bytes) {}

  absl::Status Number(int64_t& value) {
    if (left_.size() < sizeof(value)) return Short();
    std::memcpy(&value, left_.data(), sizeof(value));
    left_ = left_.subspan(sizeof(value));
    return absl::OkStatus();
  }
  // Within [low, high].
  absl::Status Number(const char* field, int64_t low, int64_t high, int64_t& value) {
    const absl::Status status = Number(value);
    if (!status.ok() || (value >= low && value <= high)) return status;
    return absl::DataLossError(
        absl::StrCat("state: ", field, " is ", value, ", want ", low, " to ", high));
  }
  template <typename T>
  absl::Status Array(std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    int64_t size = 0;
    const absl::Status status = Number(size);
    if (!status.ok()) return status;
    if (size < 0 || static_cast<uint64_t>(size) > left_.size() / sizeof(T)) return Short();
    values.resize(static_cast<size_t>(size));
    if (size > 0) std::memcpy(values.data(), left_.data(), values.size() * sizeof(T));
    left_ = left_.subspan(values.size() * sizeof(T));
    return absl::OkStatus();
  }
  absl::Status AtEnd() const {
    if (left_.empty()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("state: ", left_.size(), " bytes are left, want none"));
  }

 private:
  static absl::Status Short() { return absl::DataLossError("state: it ends too early"); }
  std::span<const std::byte> left_;
};

}  // namespace heavywater
