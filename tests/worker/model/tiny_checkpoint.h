// Tiny random checkpoints and what Transformers computes with them, as recorded in
// testdata/checkpoint_cases.json (make_checkpoint_cases.py says how).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace heavywater {

// A folder of its own under the test's temporary directory, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  void Write(const std::string& name, const std::string& bytes) const;

 private:
  std::string path_;
};

// One file of float32 or, with `dtype` "BF16", bfloat16 tensors.
struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};
std::string SafetensorsFile(const std::vector<NamedTensor>& tensors, const std::string& dtype);

class TinyCheckpoint {
 public:
  explicit TinyCheckpoint(nlohmann::json recorded);

  std::string name() const { return recorded_["name"]; }
  std::vector<int32_t> tokens() const { return recorded_["tokens"]; }
  // Of the last positions of tokens(), one row each.
  std::vector<std::vector<float>> logits() const { return recorded_["logits"]; }
  // What greedy decoding appends to tokens().
  std::vector<int32_t> greedy() const { return recorded_["greedy"]; }
  const std::vector<NamedTensor>& tensors() const { return tensors_; }

  // config.json and the weights, in as many files as the case says.
  void WriteFolder(const TemporaryFolder& folder) const;
  // The same model as llama.cpp's converter writes it, in float32.
  std::string GgufBytes() const;

 private:
  std::vector<NamedTensor> tensors_;
  nlohmann::json recorded_;
};

std::vector<TinyCheckpoint> RecordedCheckpoints();

}  // namespace heavywater
