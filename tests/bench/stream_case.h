// What the `tier` benchmark times of streaming: pages through a cache service's gRPC, and
// through the same calls of a server that only copies bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// One rank's pages of one size, over loopback TCP and in chunks of at most 1 MiB. Used by one
// thread.
class StreamCase {
 public:
  virtual ~StreamCase() = default;
  // All pages on one stream, which ends when the server has them.
  virtual absl::Status Put(const std::vector<std::vector<std::byte>>& pages) = 0;
  // Between Put() and Get().
  virtual absl::Status MakeReadable() = 0;
  // Page after page, each on a stream of its own, as the API has it.
  virtual absl::Status Get(int page, std::span<std::byte> bytes) = 0;
};

// A cache service in this process: reserves, checks, keeps and seals. Chunks carry checksums,
// which both ends compute.
absl::StatusOr<std::unique_ptr<StreamCase>> MakeServiceStream(int64_t page_bytes, int pages);
// gRPC as it is: the same messages without checksums, copied to memory and back.
absl::StatusOr<std::unique_ptr<StreamCase>> MakeBareStream(int64_t page_bytes, int pages);

}  // namespace heavywater
