// Whose sequences somebody may see.
#pragma once

#include <string>
#include <utility>

namespace heavywater {

// To the others' sequences it is as if they were not there.
class Viewer {
 public:
  static Viewer All() { return Viewer(Sight::kAll, ""); }
  static Viewer Tenant(std::string name) { return Viewer(Sight::kOne, std::move(name)); }
  static Viewer Nobody() { return Viewer(Sight::kNothing, ""); }

  bool sees_all() const { return sight_ == Sight::kAll; }
  bool sees_nothing() const { return sight_ == Sight::kNothing; }
  // The one that it may see.
  const std::string& tenant() const { return tenant_; }

  bool Sees(const std::string& tenant) const {
    return sees_all() || (sight_ == Sight::kOne && tenant == tenant_);
  }

 private:
  enum class Sight { kAll, kOne, kNothing };
  Viewer(Sight sight, std::string tenant) : sight_(sight), tenant_(std::move(tenant)) {}

  Sight sight_;
  std::string tenant_;
};

}  // namespace heavywater
