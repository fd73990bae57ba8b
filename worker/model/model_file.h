// A model as it lies on disk, whatever its format: what describes it, and its tensors.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_types.h"
#include "worker/model/model_config.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {

// Immutable and thread safe. What it returns are views that live as long as it does.
class ModelFile {
 public:
  virtual ~ModelFile() = default;

  // Errors as ReadModelConfig() and ReadTokenizerSpec() for GGUF, ParseTransformersConfig()
  // and ReadTokenizerFolder() for folders.
  virtual absl::StatusOr<ModelConfig> ReadConfig() const = 0;
  virtual absl::StatusOr<TokenizerSpec> ReadTokenizer() const = 0;
  // A short name for "the same weights" (model_fingerprint.h).
  virtual std::string Fingerprint() const = 0;

  // Tensors are asked for by GGUF's names ("blk.0.attn_q.weight"); the result's name is
  // the one in the file. Null when there is none.
  virtual const GgufTensor* FindTensor(std::string_view name) const = 0;
  // How the file names that tensor, for messages.
  virtual std::string StoredName(std::string_view name) const = 0;
  // In the file's own names, sorted: all that a model of its kind has to read.
  virtual std::vector<std::string_view> TensorNames() const = 0;

  // NOT_FOUND naming the tensor as the file would.
  absl::StatusOr<GgufTensor> GetTensor(std::string_view name) const;
};

// A GGUF file, or a folder with config.json and *.safetensors. Errors as
// GgufFile::Open() and SafetensorsFolder::Open().
absl::StatusOr<std::unique_ptr<ModelFile>> OpenModel(const std::string& path);

}  // namespace heavywater
