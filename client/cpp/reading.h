// How the clients read streams of the API.
#pragma once

#include <grpcpp/support/sync_stream.h>

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "client/cpp/rpc_status.h"

namespace heavywater {

// Reads a stream to its end, handing each message to `take`.
template <typename Message, typename Take>
absl::Status Drain(grpc::ClientReaderInterface<Message>& reader, const Take& take) {
  Message message;
  absl::Status taken;
  // Read on after an error of ours: a stream must be drained to be finished.
  while (reader.Read(&message)) {
    if (taken.ok()) taken = take(message);
  }
  HW_RETURN_IF_ERROR(FromGrpc(reader.Finish()));
  return taken;
}

// A chunk of KV rows against its checksum: DATA_LOSS naming both.
template <typename Chunk>
absl::Status CheckRows(const Chunk& chunk) {
  const uint32_t actual = Crc32c(std::as_bytes(std::span(chunk.rows())));
  if (actual == chunk.crc32c()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("rows from position ", chunk.first_position(),
                                          " have CRC32C ", actual, ", want ", chunk.crc32c()));
}

}  // namespace heavywater
