#include "worker/model/model_file.h"

#include <filesystem>
#include <system_error>

#include "worker/model/gguf_file.h"
#include "worker/model/message.h"
#include "worker/model/safetensors_folder.h"

namespace heavywater {

absl::StatusOr<GgufTensor> ModelFile::GetTensor(std::string_view name) const {
  if (const GgufTensor* tensor = FindTensor(name)) return *tensor;
  return absl::NotFoundError(Message("tensor '", StoredName(name), "' is missing"));
}

absl::StatusOr<std::unique_ptr<ModelFile>> OpenModel(const std::string& path) {
  std::error_code error;  // of a path that is not there: Open() says so
  if (std::filesystem::is_directory(path, error)) return SafetensorsFolder::Open(path);
  return GgufFile::Open(path);
}

}  // namespace heavywater
