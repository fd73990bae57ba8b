// Which roles may call which method: the whole of the API in one table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cache_service/security/tokens.h"

namespace heavywater {

class RoleSet {
 public:
  constexpr RoleSet(std::initializer_list<Role> roles) {
    for (const Role role : roles) bits_ |= 1u << static_cast<unsigned>(role);
  }
  bool contains(Role role) const { return (bits_ >> static_cast<unsigned>(role) & 1) != 0; }
  bool empty() const { return bits_ == 0; }
  std::string Names() const;  // "client or admin"

 private:
  unsigned bits_ = 0;
};

// Of "/package.Service/Method". Empty: everybody may, without a token (health). Nothing:
// the method is not in the table, and nobody may.
std::optional<RoleSet> RolesOf(absl::string_view method);

// All methods in the table.
std::vector<std::string> MethodsWithRoles();

}  // namespace heavywater
