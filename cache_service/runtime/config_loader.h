// Typed configuration of a binary: a protobuf message whose singular scalar
// fields are filled from a YAML file and from flags of the same name. Shared by
// all servers, so that every binary refuses bad configuration in the same words.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace google::protobuf {
class Message;
}

namespace heavywater {

// (field name, value as text), in the order given.
using ConfigOverrides = std::vector<std::pair<std::string, std::string>>;

// What the command line said.
struct Flags {
  std::string config_path;    // --config FILE; empty = none
  bool show_version = false;  // --version
  bool show_help = false;     // --help
  bool check_config = false;  // --check_config: say whether the server would take it, and end
  ConfigOverrides overrides;  // --name=value, --name value, --bool_name
};

// `config` says which flags exist and which of them are booleans (those may
// stand without a value). INVALID_ARGUMENT naming the flag.
absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv,
                                 const google::protobuf::Message& config);

// Fills `config` from the file (when `yaml_path` is not empty) and then from the
// overrides. Fields that neither mentions stay as they are. INVALID_ARGUMENT
// naming the key for one that is unknown, given twice, or of the wrong type;
// NOT_FOUND when there is no such file. On an error `config` is unchanged.
absl::Status LoadConfig(const std::string& yaml_path, const ConfigOverrides& overrides,
                        google::protobuf::Message* config);

// Every field as one YAML line, defaults included: reads back through
// LoadConfig().
std::string ConfigToYaml(const google::protobuf::Message& config);

// The text of --help: each flag with its type, its value in `defaults`, and what config.proto
// says of it.
std::string ConfigHelp(const std::string& binary, const google::protobuf::Message& defaults);

}  // namespace heavywater
