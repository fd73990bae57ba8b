// What config.proto says of each field, for `--help`: the file itself is within the binary.
#pragma once

#include <string>

#include "google/protobuf/descriptor.h"

namespace heavywater {

struct ConfigComment {
  std::string
      before;  // of this field and those that follow without one of their own; may have lines
  std::string behind;  // on its line
};

// Empty for a field of another file.
ConfigComment CommentOf(const google::protobuf::FieldDescriptor& field);

}  // namespace heavywater
