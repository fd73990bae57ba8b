// One JSON object's fields, checked: a wrong one is named with what was got and
// what was wanted, and so is one that nobody knows.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/status/status.h"

namespace heavywater {

class RequestFields {
 public:
  // `object` outlives this; `where` precedes names in messages ("model.").
  RequestFields(const nlohmann::json& object, std::string where);

  bool Has(const std::string& name) const { return object_.contains(name); }
  // Absent: unchanged. INVALID_ARGUMENT: another type, or outside [low, high].
  absl::Status Take(const std::string& name, int64_t low, int64_t high, int64_t& to);
  absl::Status Take(const std::string& name, int64_t low, int64_t high, int& to);
  absl::Status Take(const std::string& name, double& to);  // 0 or more, finite
  absl::Status Take(const std::string& name, bool& to);
  absl::Status Take(const std::string& name, std::string& to);
  // Read elsewhere: Finish() does not object to them.
  void Know(std::initializer_list<const char*> names) { known_.insert(names.begin(), names.end()); }
  // INVALID_ARGUMENT when it is absent.
  absl::Status Require(const std::string& name) const;
  // INVALID_ARGUMENT unless the object is one and each of its fields was asked for.
  absl::Status Finish() const;

 private:
  // Null when absent.
  const nlohmann::json* Find(const std::string& name);
  absl::Status Error(const std::string& name, const std::string& want) const;

  const nlohmann::json& object_;
  const std::string where_;
  std::set<std::string> known_;
};

}  // namespace heavywater
