// Writes small GGUF files for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_file.h"
#include "worker/model/gguf_types.h"

namespace heavywater {

// Little-endian bytes, appended.
class ByteSink {
 public:
  template <typename T>
  ByteSink& Put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  ByteSink& Bytes(std::string_view bytes) {
    bytes_ += bytes;
    return *this;
  }
  ByteSink& Text(std::string_view text) { return Put<uint64_t>(text.size()).Bytes(text); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Fields and tensors are written in the order in which they were added.
class GgufWriter {
 public:
  GgufWriter& Field(std::string_view name, std::string_view text);
  GgufWriter& Field(std::string_view name, const char* text) {
    return Field(name, std::string_view(text));
  }
  GgufWriter& Field(std::string_view name, uint32_t number);
  GgufWriter& Field(std::string_view name, float number);
  GgufWriter& Field(std::string_view name, bool flag);
  GgufWriter& Field(std::string_view name, const std::vector<std::string>& texts);
  GgufWriter& Field(std::string_view name, const std::vector<int32_t>& numbers);
  GgufWriter& Field(std::string_view name, const std::vector<float>& numbers);
  // Any field: its type's number and its bytes as given.
  GgufWriter& RawField(std::string_view name, uint32_t type, std::string_view bytes);

  // [rows][cols] of float32; rows 0 = a vector of `cols`.
  GgufWriter& Tensor(std::string_view name, int64_t rows, int64_t cols,
                     const std::vector<float>& values);
  // Any tensor: dimensions innermost first, and its bytes as stored.
  GgufWriter& RawTensor(std::string_view name, TensorType type,
                        const std::vector<uint64_t>& dimensions, std::string_view bytes);

  // The file, with 32-byte alignment.
  std::string Finish() const;

 private:
  struct StoredTensor {
    std::string name;
    TensorType type;
    std::vector<uint64_t> dimensions;
    std::string bytes;
  };

  uint64_t num_fields_ = 0;
  ByteSink fields_;
  std::vector<StoredTensor> tensors_;
};

// A file of its own under the test's temporary directory, removed at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view bytes);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Opens a file with these bytes.
absl::StatusOr<std::unique_ptr<GgufFile>> OpenGguf(std::string_view bytes);

// A field of each kind and a tensor of each type.
GgufWriter SmallGguf();

}  // namespace heavywater
