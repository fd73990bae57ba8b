#include "tests/worker/model/tiny_checkpoint.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>

#include "cache_service/base/bfloat16.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "worker/model/rope_scaling.h"
#include "worker/model/sampler.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

std::string Stored(const std::vector<float>& values, const std::string& dtype) {
  ByteSink sink;
  for (const float value : values) {
    if (dtype == "BF16") {
      sink.Put(FloatToBFloat16(value));
    } else {
      sink.Put(value);
    }
  }
  return sink.bytes();
}

// Transformers' parts of a layer's names, and GGUF's.
const std::map<std::string, std::string>& Parts() {
  static const auto* const parts = new std::map<std::string, std::string>{
      {"self_attn.q_proj", "attn_q"},          {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},          {"self_attn.o_proj", "attn_output"},
      {"self_attn.q_norm", "attn_q_norm"},     {"self_attn.k_norm", "attn_k_norm"},
      {"mlp.gate_proj", "ffn_gate"},           {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"},           {"input_layernorm", "attn_norm"},
      {"post_attention_layernorm", "ffn_norm"}};
  return *parts;
}

std::string GgufName(const std::string& name) {
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  if (name == "lm_head.weight") return "output.weight";
  const std::string prefix = "model.layers.";
  const size_t layer_end = name.find('.', prefix.size());
  const size_t kind = name.rfind('.');
  return "blk." + name.substr(prefix.size(), layer_end - prefix.size()) + "." +
         Parts().at(name.substr(layer_end + 1, kind - layer_end - 1)) + name.substr(kind);
}

// Rows i and i + half of each head to rows 2i and 2i + 1.
std::vector<float> ToNeighbours(const NamedTensor& tensor, size_t head_dim) {
  const auto rows = static_cast<size_t>(tensor.shape[0]);
  const size_t cols = tensor.values.size() / rows;
  std::vector<float> moved(tensor.values.size());
  for (size_t row = 0; row < rows; ++row) {
    const size_t in_head = row % head_dim;
    const size_t half = head_dim / 2;
    const size_t to = row - in_head + 2 * (in_head % half) + in_head / half;
    std::copy_n(tensor.values.begin() + static_cast<ptrdiff_t>(row * cols), cols,
                moved.begin() + static_cast<ptrdiff_t>(to * cols));
  }
  return moved;
}

int HeadDim(const Json& config) {
  if (config.contains("head_dim")) return config["head_dim"];
  return config["hidden_size"].get<int>() / config["num_attention_heads"].get<int>();
}

void AddScaling(const std::string& arch, const Json& config, GgufWriter& writer) {
  if (!config.contains("rope_scaling")) return;
  const Json& scaling = config["rope_scaling"];
  const std::string type = scaling.value("rope_type", scaling.value("type", ""));
  if (type == "llama3") {  // GGUF has the factors themselves
    RopeScaling llama3;
    llama3.kind = RopeScaling::Kind::kLlama3;
    llama3.factor = scaling["factor"];
    llama3.original_context = scaling["original_max_position_embeddings"];
    llama3.low_frequency_factor = scaling["low_freq_factor"];
    llama3.high_frequency_factor = scaling["high_freq_factor"];
    const auto factors = RopeFactors(llama3, HeadDim(config), config["rope_theta"]);
    writer.Tensor("rope_freqs.weight", 0, static_cast<int64_t>(factors.size()), factors);
    return;
  }
  writer.Field(arch + ".rope.scaling.type", type)
      .Field(arch + ".rope.scaling.factor", scaling["factor"].get<float>());
  if (scaling.contains("original_max_position_embeddings")) {
    writer.Field(arch + ".rope.scaling.original_context_length",
                 scaling["original_max_position_embeddings"].get<uint32_t>());
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  static std::atomic<int> count = 0;
  path_ = testing::TempDir() + "heavywater_folder_" + std::to_string(getpid()) + "_" +
          std::to_string(count++);
  std::filesystem::create_directory(path_);
}

TemporaryFolder::~TemporaryFolder() { std::filesystem::remove_all(path_); }

void TemporaryFolder::Write(const std::string& name, const std::string& bytes) const {
  std::ofstream file(path_ + "/" + name, std::ios::binary);
  file << bytes;
  EXPECT_TRUE(file.good()) << path_ << "/" << name;
}

std::string SafetensorsFile(const std::vector<NamedTensor>& tensors, const std::string& dtype) {
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const NamedTensor& tensor : tensors) {
    const size_t begin = data.size();
    data += Stored(tensor.values, dtype);
    header[tensor.name] = {
        {"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  return ByteSink().Put<uint64_t>(text.size()).Bytes(text).Bytes(data).bytes();
}

TinyCheckpoint::TinyCheckpoint(Json recorded) : recorded_(std::move(recorded)) {
  uint64_t drawn = 0;
  const uint64_t seed = recorded_["seed"];
  for (const Json& entry : recorded_["tensors"]) {
    NamedTensor& tensor = tensors_.emplace_back();
    tensor.name = entry[0];
    tensor.shape = entry[1].get<std::vector<int64_t>>();
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    const double scale = entry[2];
    const double offset = entry[3];
    for (int64_t i = 0; i < count; ++i) {
      const double uniform = 2 * UniformAt(seed, drawn++) - 1;
      tensor.values.push_back(static_cast<float>(offset + scale * uniform));
    }
  }
}

void TinyCheckpoint::WriteFolder(const TemporaryFolder& folder) const {
  folder.Write("config.json", recorded_["config"].dump());
  const size_t files = recorded_["files"];
  if (files == 1) {
    folder.Write("model.safetensors", SafetensorsFile(tensors_, recorded_["dtype"]));
    return;
  }
  Json index = {{"weight_map", Json::object()}};
  for (size_t file = 0; file < files; ++file) {
    const std::string name = "model-" + std::to_string(file) + ".safetensors";
    std::vector<NamedTensor> part;
    for (size_t i = file; i < tensors_.size(); i += files) {
      part.push_back(tensors_[i]);
      index["weight_map"][tensors_[i].name] = name;
    }
    folder.Write(name, SafetensorsFile(part, recorded_["dtype"]));
  }
  folder.Write("model.safetensors.index.json", index.dump());
}

std::string TinyCheckpoint::GgufBytes() const {
  const Json& config = recorded_["config"];
  const std::string type = config["model_type"];
  const std::string arch = type == "mistral" ? "llama" : type;  // as files in the wild
  const auto number = [&](const char* field) { return config[field].get<uint32_t>(); };
  const auto head_dim = static_cast<uint32_t>(HeadDim(config));
  GgufWriter writer;
  writer.Field("general.architecture", arch)
      .Field(arch + ".block_count", number("num_hidden_layers"))
      .Field(arch + ".context_length", number("max_position_embeddings"))
      .Field(arch + ".embedding_length", number("hidden_size"))
      .Field(arch + ".feed_forward_length", number("intermediate_size"))
      .Field(arch + ".attention.head_count", number("num_attention_heads"))
      .Field(arch + ".attention.head_count_kv", number("num_key_value_heads"))
      .Field(arch + ".attention.key_length", head_dim)
      .Field(arch + ".attention.value_length", head_dim)
      .Field(arch + ".rope.freq_base", config["rope_theta"].get<float>())
      .Field(arch + ".attention.layer_norm_rms_epsilon", config["rms_norm_eps"].get<float>());
  AddScaling(arch, config, writer);
  for (const NamedTensor& tensor : tensors_) {
    std::vector<float> values = tensor.values;
    const bool turns = tensor.name.find("q_proj") != std::string::npos ||
                       tensor.name.find("k_proj") != std::string::npos;
    if (arch == "llama" && turns) values = ToNeighbours(tensor, head_dim);
    if (recorded_["dtype"] == "BF16") {
      for (float& value : values) value = BFloat16ToFloat(FloatToBFloat16(value));
    }
    const int64_t rows = tensor.shape.size() == 1 ? 0 : tensor.shape[0];
    writer.Tensor(GgufName(tensor.name), rows, tensor.shape.back(), values);
  }
  return writer.Finish();
}

std::vector<TinyCheckpoint> RecordedCheckpoints() {
  std::ifstream stream(HEAVYWATER_SOURCE_DIR "/tests/worker/model/testdata/checkpoint_cases.json");
  std::vector<TinyCheckpoint> checkpoints;
  for (Json& recorded : Json::parse(stream)) checkpoints.emplace_back(std::move(recorded));
  return checkpoints;
}

}  // namespace heavywater
