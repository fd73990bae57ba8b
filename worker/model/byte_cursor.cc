#include "worker/model/byte_cursor.h"

#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {

absl::StatusOr<std::span<const std::byte>> ByteCursor::Take(uint64_t count, std::string_view what) {
  if (count > remaining()) {
    return absl::DataLossError(Message(what, ": needs ", count, " bytes at offset ", offset_,
                                       ", but only ", remaining(), " are left"));
  }
  const auto taken = bytes_.subspan(offset_, static_cast<size_t>(count));
  offset_ += static_cast<size_t>(count);
  return taken;
}

absl::StatusOr<std::string_view> ByteCursor::ReadString(uint64_t max_bytes, std::string_view what) {
  HW_ASSIGN_OR_RETURN(const uint64_t length, Read<uint64_t>(what));
  if (length > max_bytes) {
    return absl::ResourceExhaustedError(
        Message(what, ": ", length, " bytes long, limit ", max_bytes));
  }
  HW_ASSIGN_OR_RETURN(const auto bytes, Take(length, what));
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace heavywater
