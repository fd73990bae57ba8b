#include "cache_service/runtime/config_loader.h"

#include <yaml-cpp/yaml.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/config_comments.h"
#include "cache_service/runtime/config_field.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace heavywater {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kMaxConfigBytes = 1 << 20;

absl::StatusOr<const FieldDescriptor*> FindField(const Descriptor& type, const std::string& name) {
  const FieldDescriptor* field = type.FindFieldByName(name);
  if (field != nullptr) return field;
  std::string known;
  for (int i = 0; i < type.field_count(); ++i) {
    absl::StrAppend(&known, i == 0 ? "" : ", ", type.field(i)->name());
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown configuration key \"", name, "\", want one of: ", known));
}

absl::Status SetByName(const std::string& name, const std::string& text, Message* config) {
  HW_ASSIGN_OR_RETURN(const FieldDescriptor* field, FindField(*config->GetDescriptor(), name));
  return SetConfigField(*field, text, config);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("configuration file ", path, " is a folder, want a file"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot open configuration file ", path));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(absl::StrCat("configuration file ", path, " has ",
                                                   text.size(), " bytes, want at most ",
                                                   kMaxConfigBytes));
  }
  return text;
}

absl::Status ApplyEntry(const std::string& key, const YAML::Node& value, Message* config) {
  HW_ASSIGN_OR_RETURN(const FieldDescriptor* field, FindField(*config->GetDescriptor(), key));
  if (value.IsNull()) return absl::OkStatus();  // "key:" alone keeps the default
  if (value.IsScalar()) return SetConfigField(*field, value.Scalar(), config);
  return absl::InvalidArgumentError(absl::StrCat(key, " is a ", value.IsMap() ? "map" : "sequence",
                                                 ", want ", ConfigFieldType(*field)));
}

// yaml-cpp throws; nothing of it leaves this function.
absl::Status ApplyYaml(const std::string& text, Message* config) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the file has ", documents.size(), " documents, want one"));
    }
    if (documents.empty()) return absl::OkStatus();
    const YAML::Node& root = documents.front();
    if (root.IsNull()) return absl::OkStatus();
    if (!root.IsMap()) {
      return absl::InvalidArgumentError("the file is not a map of configuration keys");
    }
    std::set<std::string> seen;
    for (const auto& entry : root) {
      const std::string key = entry.first.as<std::string>();
      if (!seen.insert(key).second) {
        return absl::InvalidArgumentError(absl::StrCat(key, " is given twice"));
      }
      HW_RETURN_IF_ERROR(ApplyEntry(key, entry.second, config));
    }
    return absl::OkStatus();
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
}

struct Flag {
  std::string name;
  std::optional<std::string> value;  // absent: the next argument is the value
};

absl::StatusOr<Flag> SplitFlag(const std::string& argument, const Descriptor& type) {
  if (!absl::StartsWith(argument, "--") || argument.size() == 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", argument, "\", want --name=value"));
  }
  Flag flag;
  const size_t equals = argument.find('=');
  flag.name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
  if (equals != std::string::npos) flag.value = argument.substr(equals + 1);
  if (flag.name == "config") return flag;
  HW_ASSIGN_OR_RETURN(const FieldDescriptor* field, FindField(type, flag.name));
  const bool is_bool = field->type() == FieldDescriptor::TYPE_BOOL;
  if (is_bool && !flag.value.has_value()) flag.value = "true";
  return flag;
}

absl::Status Annotate(const absl::Status& status, const std::string& where) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv, const Message& config) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--version") {
      flags.show_version = true;
      continue;
    }
    if (argument == "--help") {
      flags.show_help = true;
      continue;
    }
    if (argument == "--check_config") {
      flags.check_config = true;
      continue;
    }
    HW_ASSIGN_OR_RETURN(Flag flag, SplitFlag(argument, *config.GetDescriptor()));
    if (!flag.value.has_value()) {
      if (i + 1 >= argc) {
        return absl::InvalidArgumentError(absl::StrCat("flag --", flag.name, " has no value"));
      }
      flag.value = argv[++i];
    }
    if (flag.name == "config") {
      flags.config_path = *flag.value;
    } else {
      flags.overrides.emplace_back(flag.name, *flag.value);
    }
  }
  return flags;
}

absl::Status LoadConfig(const std::string& yaml_path, const ConfigOverrides& overrides,
                        Message* config) {
  std::unique_ptr<Message> loaded(config->New());
  loaded->CopyFrom(*config);
  if (!yaml_path.empty()) {
    HW_ASSIGN_OR_RETURN(const std::string text, ReadFile(yaml_path));
    const absl::Status status = ApplyYaml(text, loaded.get());
    if (!status.ok()) return Annotate(status, yaml_path);
  }
  for (const auto& [name, value] : overrides) {
    const absl::Status status = SetByName(name, value, loaded.get());
    if (!status.ok()) return Annotate(status, absl::StrCat("flag --", name));
  }
  config->CopyFrom(*loaded);
  return absl::OkStatus();
}

std::string ConfigToYaml(const Message& config) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  const Descriptor& type = *config.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    out << YAML::Key << field.name() << YAML::Value;
    if (field.type() == FieldDescriptor::TYPE_STRING) out << YAML::DoubleQuoted;
    out << ConfigFieldText(field, config);
  }
  out << YAML::EndMap;
  return absl::StrCat(out.c_str(), "\n");
}

std::string ConfigHelp(const std::string& binary, const Message& defaults) {
  std::string help =
      absl::StrCat("Usage: ", binary, " [--config FILE] [--name=value ...]\n\n",
                   "  --config FILE (YAML with the names below)\n",
                   "  --check_config (print the configuration and end, 2 if it is refused)\n",
                   "  --help\n  --version\n");
  const Descriptor& type = *defaults.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const ConfigComment comment = CommentOf(field);
    if (!comment.before.empty()) {
      absl::StrAppend(&help, "\n", comment.before, "\n");
    }
    const std::string value = ConfigFieldText(field, defaults);
    absl::StrAppend(&help, "  --", field.name(), " (", ConfigFieldType(field), ")");
    absl::StrAppend(&help, value.empty() ? "" : absl::StrCat(" [", value, "]"));
    const bool tells = !comment.behind.empty() && comment.behind.front() != '[';  // more than that
    absl::StrAppend(&help, tells ? absl::StrCat(": ", comment.behind) : "", "\n");
  }
  return help;
}

}  // namespace heavywater
