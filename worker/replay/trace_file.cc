#include "worker/replay/trace_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "worker/cache/kv_element.h"
#include "worker/cache/kv_layout.h"
#include "worker/sizing/request_fields.h"

namespace heavywater {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::array<char, 8> kMagic = {'h', 'w', 't', 'r', 'a', 'c', 'e', '\0'};
constexpr uint32_t kMaxHeaderBytes = 64 << 10;
constexpr size_t kChecksumBlock = 4096;
constexpr int kMaxLayers = 1024;
constexpr int kMaxHeads = 1024;

struct Prefix {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kTraceVersion;
  uint32_t header_bytes = 0;
  uint32_t header_crc = 0;
};
static_assert(sizeof(Prefix) == 20);

uint32_t ChecksumOf(std::span<const std::byte> bytes) {
  uint32_t checksum = 0;
  for (size_t first = 0; first < bytes.size(); first += kChecksumBlock) {
    const uint32_t block =
        Crc32c(bytes.subspan(first, std::min(kChecksumBlock, bytes.size() - first)));
    checksum = Crc32c(std::as_bytes(std::span(&block, 1)), checksum);
  }
  return checksum;
}

std::string HeaderOf(const TraceShape& shape) {
  const nlohmann::json header = {{"num_layers", shape.num_layers},
                                 {"num_query_heads", shape.num_query_heads},
                                 {"num_kv_heads", shape.num_kv_heads},
                                 {"head_dim", shape.head_dim},
                                 {"num_tokens", shape.num_tokens},
                                 {"prompt_tokens", shape.prompt_tokens},
                                 {"dtype", std::string(KvDtypeName(shape.dtype))},
                                 {"attention_scale", shape.attention_scale},
                                 {"model", shape.model}};
  return header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<TraceShape> ParseHeader(const std::string& text) {
  const nlohmann::json header = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  RequestFields fields(header, "the trace's ");
  TraceShape shape;
  std::string dtype(KvDtypeName(shape.dtype));
  if (!header.is_object()) {
    return absl::InvalidArgumentError("the trace's header is no JSON object");
  }
  for (const char* name : {"num_layers", "num_query_heads", "num_kv_heads", "head_dim",
                           "num_tokens", "prompt_tokens", "dtype"}) {
    HW_RETURN_IF_ERROR(fields.Require(name));
  }
  HW_RETURN_IF_ERROR(fields.Take("num_layers", 1, kMaxLayers, shape.num_layers));
  HW_RETURN_IF_ERROR(fields.Take("num_query_heads", 1, kMaxHeads, shape.num_query_heads));
  HW_RETURN_IF_ERROR(fields.Take("num_kv_heads", 1, kMaxHeads, shape.num_kv_heads));
  HW_RETURN_IF_ERROR(fields.Take("head_dim", 1, kMaxKvHeadDim, shape.head_dim));
  HW_RETURN_IF_ERROR(fields.Take("num_tokens", 1, kMaxTraceTokens, shape.num_tokens));
  HW_RETURN_IF_ERROR(fields.Take("prompt_tokens", 1, kMaxTraceTokens, shape.prompt_tokens));
  HW_RETURN_IF_ERROR(fields.Take("dtype", dtype));
  HW_RETURN_IF_ERROR(fields.Take("attention_scale", shape.attention_scale));
  HW_RETURN_IF_ERROR(fields.Take("model", shape.model));
  HW_RETURN_IF_ERROR(fields.Finish());
  HW_ASSIGN_OR_RETURN(shape.dtype, ParseKvDtype(dtype));
  HW_RETURN_IF_ERROR(shape.Validate());
  return shape;
}

absl::Status CheckRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want ", low, " to ", high));
}

absl::Status Cut(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrCat(path, ": ", what));
}

absl::Status ReadBytes(std::ifstream& file, const std::string& path, const std::string& what,
                       std::span<std::byte> to) {
  file.read(reinterpret_cast<char*>(to.data()), static_cast<std::streamsize>(to.size()));
  if (file.gcount() == static_cast<std::streamsize>(to.size())) return absl::OkStatus();
  return Cut(path, absl::StrCat("ends within ", what));
}

absl::StatusOr<TraceShape> ReadHeader(std::ifstream& file, const std::string& path) {
  Prefix prefix;
  HW_RETURN_IF_ERROR(
      ReadBytes(file, path, "its first 20 bytes", std::as_writable_bytes(std::span(&prefix, 1))));
  if (prefix.magic != kMagic) return Cut(path, "is no trace of Heavywater's");
  if (prefix.version != kTraceVersion) {
    return Cut(path,
               absl::StrCat("is a trace of version ", prefix.version, ", want ", kTraceVersion));
  }
  if (prefix.header_bytes > kMaxHeaderBytes) {
    return Cut(path, absl::StrCat("has a header of ", prefix.header_bytes, " bytes, want at most ",
                                  kMaxHeaderBytes));
  }
  std::string header(prefix.header_bytes, ' ');
  const auto bytes = std::as_writable_bytes(std::span(header.data(), header.size()));
  HW_RETURN_IF_ERROR(ReadBytes(file, path, "its header", bytes));
  if (Crc32c(bytes) != prefix.header_crc) return Cut(path, "its header has another checksum");
  absl::StatusOr<TraceShape> shape = ParseHeader(header);
  if (shape.ok()) return shape;
  return absl::Status(shape.status().code(), absl::StrCat(path, ": ", shape.status().message()));
}

// Takes `count` numbers from the front of `from`.
absl::StatusOr<std::vector<float>> TakeFloats(std::span<const std::byte>& from, int64_t count,
                                              KvDtype dtype, const std::string& what) {
  std::vector<float> floats(count);
  const auto bytes = static_cast<size_t>(count * ElementBytes(dtype));
  LoadKvRow(dtype, from.data(), floats);
  from = from.subspan(bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(floats[i])) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, "[", i, "] is ", floats[i], ", want a finite number"));
  }
  return floats;
}

absl::StatusOr<TraceLayer> ParseLayer(std::span<const std::byte> bytes, const TraceShape& shape,
                                      const std::string& where) {
  const int64_t queries = shape.num_tokens * shape.query_width();
  const int64_t keys = shape.num_tokens * shape.kv_width();
  TraceLayer layer;
  HW_ASSIGN_OR_RETURN(layer.q, TakeFloats(bytes, queries, shape.dtype, where + "Q"));
  HW_ASSIGN_OR_RETURN(layer.k, TakeFloats(bytes, keys, shape.dtype, where + "K"));
  HW_ASSIGN_OR_RETURN(layer.v, TakeFloats(bytes, keys, shape.dtype, where + "V"));
  return layer;
}

std::vector<std::byte> BytesOfLayer(const TraceLayer& layer, KvDtype dtype) {
  std::vector<std::byte> bytes((layer.q.size() + layer.k.size() + layer.v.size()) *
                               ElementBytes(dtype));
  std::byte* to = bytes.data();
  for (const std::vector<float>* part : {&layer.q, &layer.k, &layer.v}) {
    StoreKvRow(dtype, *part, to);
    to += part->size() * ElementBytes(dtype);
  }
  return bytes;
}

void Write(std::ofstream& file, std::span<const std::byte> bytes) {
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

absl::Status TraceShape::Validate() const {
  HW_RETURN_IF_ERROR(CheckRange("num_layers", num_layers, 1, kMaxLayers));
  HW_RETURN_IF_ERROR(CheckRange("num_query_heads", num_query_heads, 1, kMaxHeads));
  HW_RETURN_IF_ERROR(CheckRange("num_kv_heads", num_kv_heads, 1, kMaxHeads));
  HW_RETURN_IF_ERROR(CheckRange("head_dim", head_dim, 8, kMaxKvHeadDim));
  HW_RETURN_IF_ERROR(CheckRange("num_tokens", num_tokens, 1, kMaxTraceTokens));
  HW_RETURN_IF_ERROR(CheckRange("prompt_tokens", prompt_tokens, 1, num_tokens));
  HW_RETURN_IF_ERROR(
      CheckRange("the trace's size in bytes", num_layers * layer_bytes(), 1, kMaxTraceBytes));
  if (num_query_heads % num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("num_query_heads is ", num_query_heads,
                                                   ", want a multiple of num_kv_heads, ",
                                                   num_kv_heads));
  }
  if (head_dim % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", head_dim, ", want a multiple of 8"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Trace> ReadTrace(const std::string& path) {
  std::error_code failure;
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, failure));
  std::ifstream file(path, std::ios::binary);
  if (failure || !file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  Trace trace;
  HW_ASSIGN_OR_RETURN(trace.shape, ReadHeader(file, path));
  const int64_t layer_bytes = trace.shape.layer_bytes();
  const int64_t want = static_cast<int64_t>(file.tellg()) +
                       trace.shape.num_layers * (layer_bytes + int64_t{sizeof(uint32_t)});
  if (size != want) return Cut(path, absl::StrCat("has ", size, " bytes, want ", want));
  std::vector<std::byte> bytes(layer_bytes);
  for (int i = 0; i < trace.shape.num_layers; ++i) {
    const std::string where = absl::StrCat("layer ", i);
    uint32_t checksum = 0;
    HW_RETURN_IF_ERROR(ReadBytes(file, path, where, bytes));
    HW_RETURN_IF_ERROR(
        ReadBytes(file, path, where, std::as_writable_bytes(std::span(&checksum, 1))));
    if (ChecksumOf(bytes) != checksum) return Cut(path, where + " has another checksum");
    HW_ASSIGN_OR_RETURN(TraceLayer layer,
                        ParseLayer(bytes, trace.shape, absl::StrCat(path, ": ", where, ": ")));
    trace.layers.push_back(std::move(layer));
  }
  return trace;
}

absl::Status WriteTrace(const std::string& path, const Trace& trace) {
  const TraceShape& shape = trace.shape;
  HW_RETURN_IF_ERROR(shape.Validate());
  HW_RETURN_IF_ERROR(CheckRange("layers", static_cast<int64_t>(trace.layers.size()),
                                shape.num_layers, shape.num_layers));
  const std::string header = HeaderOf(shape);
  const auto header_bytes = std::as_bytes(std::span(header.data(), header.size()));
  const Prefix prefix = {.header_bytes = static_cast<uint32_t>(header.size()),
                         .header_crc = Crc32c(header_bytes)};
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary);
  Write(file, std::as_bytes(std::span(&prefix, 1)));
  Write(file, header_bytes);
  for (const TraceLayer& layer : trace.layers) {
    const std::vector<std::byte> bytes = BytesOfLayer(layer, shape.dtype);
    HW_RETURN_IF_ERROR(CheckRange("a layer's bytes", static_cast<int64_t>(bytes.size()),
                                  shape.layer_bytes(), shape.layer_bytes()));
    const uint32_t checksum = ChecksumOf(bytes);
    Write(file, bytes);
    Write(file, std::as_bytes(std::span(&checksum, 1)));
  }
  file.close();
  std::error_code failure;
  if (file) std::filesystem::rename(part, path, failure);
  if (file && !failure) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cannot write ", path));
}

}  // namespace heavywater
