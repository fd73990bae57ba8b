#include "worker/sizing/request_fields.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr size_t kMaxShown = 60;

std::string Shown(const nlohmann::json& value) {
  const std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() <= kMaxShown ? text : text.substr(0, kMaxShown) + "...";
}

bool Within(const nlohmann::json& value, int64_t low, int64_t high) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    return false;
  }
  const auto number = value.get<int64_t>();
  return number >= low && number <= high;
}

}  // namespace

RequestFields::RequestFields(const nlohmann::json& object, std::string where)
    : object_(object), where_(std::move(where)) {}

const nlohmann::json* RequestFields::Find(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() ? nullptr : &*found;
}

absl::Status RequestFields::Error(const std::string& name, const std::string& want) const {
  return absl::InvalidArgumentError(
      absl::StrCat(where_, name, " is ", Shown(object_.at(name)), ", want ", want));
}

absl::Status RequestFields::Take(const std::string& name, int64_t low, int64_t high, int64_t& to) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (!Within(*value, low, high)) return Error(name, absl::StrCat(low, " to ", high));
  to = value->get<int64_t>();
  return absl::OkStatus();
}

absl::Status RequestFields::Take(const std::string& name, int64_t low, int64_t high, int& to) {
  int64_t wide = to;
  const absl::Status status = Take(name, low, high, wide);
  if (status.ok()) to = static_cast<int>(wide);
  return status;
}

absl::Status RequestFields::Take(const std::string& name, double& to) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_number() || !(value->get<double>() >= 0) || std::isinf(value->get<double>())) {
    return Error(name, "a number of 0 or more");
  }
  to = value->get<double>();
  return absl::OkStatus();
}

absl::Status RequestFields::Take(const std::string& name, bool& to) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_boolean()) return Error(name, "true or false");
  to = value->get<bool>();
  return absl::OkStatus();
}

absl::Status RequestFields::Take(const std::string& name, std::string& to) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return absl::OkStatus();
  if (!value->is_string()) return Error(name, "a text");
  to = value->get<std::string>();
  return absl::OkStatus();
}

absl::Status RequestFields::Require(const std::string& name) const {
  if (Has(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(where_, name, " is missing"));
}

absl::Status RequestFields::Finish() const {
  if (!object_.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where_, " is ", Shown(object_), ", want an object"));
  }
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(where_, name, " is given, but there is no such field"));
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
