#include "tests/worker/model/gguf_writer.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

constexpr size_t kAlignment = 32;

size_t Aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

GgufWriter& GgufWriter::RawField(std::string_view name, uint32_t type, std::string_view bytes) {
  ++num_fields_;
  fields_.Text(name).Put(type).Bytes(bytes);
  return *this;
}

GgufWriter& GgufWriter::Field(std::string_view name, std::string_view text) {
  return RawField(name, static_cast<uint32_t>(GgufType::kString), ByteSink().Text(text).bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, uint32_t number) {
  return RawField(name, static_cast<uint32_t>(GgufType::kUint32), ByteSink().Put(number).bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, float number) {
  return RawField(name, static_cast<uint32_t>(GgufType::kFloat32), ByteSink().Put(number).bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, bool flag) {
  return RawField(name, static_cast<uint32_t>(GgufType::kBool),
                  ByteSink().Put<uint8_t>(flag ? 1 : 0).bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, const std::vector<std::string>& texts) {
  ByteSink sink;
  sink.Put(static_cast<uint32_t>(GgufType::kString)).Put<uint64_t>(texts.size());
  for (const std::string& text : texts) sink.Text(text);
  return RawField(name, static_cast<uint32_t>(GgufType::kArray), sink.bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, const std::vector<int32_t>& numbers) {
  ByteSink sink;
  sink.Put(static_cast<uint32_t>(GgufType::kInt32)).Put<uint64_t>(numbers.size());
  for (const int32_t number : numbers) sink.Put(number);
  return RawField(name, static_cast<uint32_t>(GgufType::kArray), sink.bytes());
}

GgufWriter& GgufWriter::Field(std::string_view name, const std::vector<float>& numbers) {
  ByteSink sink;
  sink.Put(static_cast<uint32_t>(GgufType::kFloat32)).Put<uint64_t>(numbers.size());
  for (const float number : numbers) sink.Put(number);
  return RawField(name, static_cast<uint32_t>(GgufType::kArray), sink.bytes());
}

GgufWriter& GgufWriter::Tensor(std::string_view name, int64_t rows, int64_t cols,
                               const std::vector<float>& values) {
  std::vector<uint64_t> dimensions = {static_cast<uint64_t>(cols)};
  if (rows > 0) dimensions.push_back(static_cast<uint64_t>(rows));
  return RawTensor(name, TensorType::kF32, dimensions,
                   {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}

GgufWriter& GgufWriter::RawTensor(std::string_view name, TensorType type,
                                  const std::vector<uint64_t>& dimensions, std::string_view bytes) {
  tensors_.push_back({std::string(name), type, dimensions, std::string(bytes)});
  return *this;
}

std::string GgufWriter::Finish() const {
  ByteSink sink;
  sink.Bytes("GGUF").Put<uint32_t>(3).Put<uint64_t>(tensors_.size()).Put(num_fields_);
  sink.Bytes(fields_.bytes());
  size_t offset = 0;
  for (const StoredTensor& tensor : tensors_) {
    sink.Text(tensor.name).Put(static_cast<uint32_t>(tensor.dimensions.size()));
    for (const uint64_t dimension : tensor.dimensions) sink.Put(dimension);
    sink.Put(static_cast<uint32_t>(tensor.type)).Put<uint64_t>(offset);
    offset += Aligned(tensor.bytes.size());
  }
  std::string file = sink.bytes();
  for (const StoredTensor& tensor : tensors_) {
    file.resize(Aligned(file.size()));
    file += tensor.bytes;
  }
  return file;
}

TemporaryFile::TemporaryFile(std::string_view bytes) {
  static std::atomic<int> count = 0;
  path_ = testing::TempDir() + "heavywater_" + std::to_string(getpid()) + "_" +
          std::to_string(count++) + ".gguf";
  std::ofstream file(path_, std::ios::binary);
  file << bytes;
  EXPECT_TRUE(file.good()) << path_;
}

TemporaryFile::~TemporaryFile() { std::remove(path_.c_str()); }

absl::StatusOr<std::unique_ptr<GgufFile>> OpenGguf(std::string_view bytes) {
  return GgufFile::Open(TemporaryFile(bytes).path());
}

GgufWriter SmallGguf() {
  GgufWriter writer;
  writer.Field("text", "hello")
      .Field("number", uint32_t{7})
      .Field("float", 0.5f)
      .Field("flag", true)
      .Field("texts", std::vector<std::string>{"a", "", "c"})
      .Field("numbers", std::vector<int32_t>{-1, 2});
  writer.RawField("negative", static_cast<uint32_t>(GgufType::kInt8), "\xfe");
  writer.Tensor("matrix", 2, 3, {1, 2, 3, 4, 5, 6});
  writer.RawTensor("quantised", TensorType::kQ8_0, {64, 2}, std::string(4 * 34, '\1'));
  writer.RawTensor("small", TensorType::kQ4_1, {32}, std::string(20, '\2'));
  writer.RawTensor("half", TensorType::kF16, {2, 2, 2}, std::string(16, '\3'));
  return writer;
}

}  // namespace heavywater
