#include "cache_service/runtime/config_comments.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "cache_service/base/check.h"
#include "google/protobuf/descriptor.pb.h"

// HEAVYWATER_CONFIG_DESCRIPTORS names the compiled config.proto (proto/CMakeLists.txt).
asm(R"(
  .section .rodata
  .global heavywater_config_descriptors
  .global heavywater_config_descriptors_end
heavywater_config_descriptors:
  .incbin ")" HEAVYWATER_CONFIG_DESCRIPTORS R"("
heavywater_config_descriptors_end:
  .previous
)");
extern "C" const char heavywater_config_descriptors[];      // NOLINT
extern "C" const char heavywater_config_descriptors_end[];  // NOLINT

namespace heavywater {
namespace {

using google::protobuf::DescriptorPool;

const DescriptorPool& Commented() {
  static const DescriptorPool* const pool = [] {
    google::protobuf::FileDescriptorSet files;
    const auto bytes = heavywater_config_descriptors_end - heavywater_config_descriptors;
    HW_CHECK(files.ParseFromArray(heavywater_config_descriptors, static_cast<int>(bytes)));
    auto* const made = new DescriptorPool();
    for (const auto& file : files.file()) HW_CHECK(made->BuildFile(file) != nullptr);
    return made;
  }();
  return *pool;
}

// Lines keep a blank from behind the slashes.
std::string Text(const std::string& comment) {
  const std::string lines = absl::StrReplaceAll(comment, {{"\n ", "\n"}});
  return std::string(absl::StripAsciiWhitespace(lines));
}

}  // namespace

ConfigComment CommentOf(const google::protobuf::FieldDescriptor& field) {
  const auto* const commented = Commented().FindFieldByName(field.full_name());
  google::protobuf::SourceLocation location;
  if (commented == nullptr || !commented->GetSourceLocation(&location)) return {};
  return {Text(location.leading_comments), Text(location.trailing_comments)};
}

}  // namespace heavywater
