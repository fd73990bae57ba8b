// How the disk tier's RocksDB is set up; its benchmark sets up its peer likewise.
#pragma once

#include <rocksdb/options.h>

#include <algorithm>
#include <cstdint>

namespace heavywater {

inline rocksdb::Options DiskTierDatabaseOptions(int64_t total_bytes) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;  // KV does not compress
  options.enable_blob_files = true;  // pages are written once, not merged over and over
  options.min_blob_size = 1024;
  // Files go when all of their pages have gone, which come and go by sequence. Nothing is
  // collected from those that still have some: that would read pages, and one which has
  // changed on disk would stop all writes.
  options.enable_blob_garbage_collection = false;
  options.blob_file_size = std::clamp<int64_t>(total_bytes / 64, 1 << 20, 64 << 20);
  // Memory beside the slab: two of these at most.
  options.write_buffer_size = std::clamp<int64_t>(total_bytes / 16, 1 << 20, 16 << 20);
  options.max_write_buffer_number = 2;
  options.max_open_files = 256;
  options.keep_log_file_num = 2;
  options.max_log_file_size = 1 << 20;
  return options;
}

}  // namespace heavywater
