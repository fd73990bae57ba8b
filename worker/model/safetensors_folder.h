// A model as Transformers saves it: a folder with config.json, tokenizer.json, and the
// weights in model.safetensors or in the files of model.safetensors.index.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "worker/model/mapped_file.h"
#include "worker/model/model_file.h"
#include "worker/model/safetensors_parser.h"

namespace heavywater {

// Immutable and thread safe.
class SafetensorsFolder final : public ModelFile {
 public:
  // NOT_FOUND naming the file that is missing; INVALID_ARGUMENT for an index that names
  // files outside the folder or tensors that its files do not have, or a tensor in two
  // files; else as ParseSafetensors(), with the path before the message.
  static absl::StatusOr<std::unique_ptr<SafetensorsFolder>> Open(const std::string& folder);

  absl::StatusOr<ModelConfig> ReadConfig() const override;
  absl::StatusOr<TokenizerSpec> ReadTokenizer() const override;
  // "safetensors-" and 16 hex digits, as ModelFingerprint() over config.json, and the
  // header, size and tensors of each file.
  std::string Fingerprint() const override;

  const GgufTensor* FindTensor(std::string_view name) const override;
  // "model.layers.0.self_attn.q_proj.weight"; `name` itself for what Transformers has no
  // tensor for.
  std::string StoredName(std::string_view name) const override;
  // Without what old versions saved and nothing needs: RoPE's frequencies, and the
  // logits' matrix where the embedding stands for it.
  std::vector<std::string_view> TensorNames() const override;

 private:
  struct Part {
    MappedFile file;
    SafetensorsContents contents;
  };

  explicit SafetensorsFolder(std::string folder) : folder_(std::move(folder)) {}
  absl::Status OpenWeights();
  absl::Status OpenPart(const std::string& name);
  absl::Status OpenIndexed(const std::string& path);

  const std::string folder_;
  MappedFile config_;
  std::vector<Part> parts_;
  absl::flat_hash_map<std::string_view, const GgufTensor*> tensors_;
};

}  // namespace heavywater
