#include "cache_service/runtime/method_roles.h"

#include <map>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr RoleSet kEverybody = {};
constexpr RoleSet kAnyToken = {Role::kClient, Role::kWorker, Role::kAdmin};
constexpr RoleSet kAdmins = {Role::kAdmin};
// Ranks and engines: they act for every tenant.
constexpr RoleSet kWorkers = {Role::kWorker};
// Clients see what is their tenant's; the services see to that.
constexpr RoleSet kReaders = {Role::kClient, Role::kWorker, Role::kAdmin};
constexpr RoleSet kClients = {Role::kClient, Role::kAdmin};

const std::map<absl::string_view, RoleSet>& Table() {
  static const auto* const table = new std::map<absl::string_view, RoleSet>{
      // Probes have no tokens, and the answer says nothing of anybody's data.
      {"/grpc.health.v1.Health/Check", kEverybody},
      {"/grpc.health.v1.Health/Watch", kEverybody},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kAnyToken},

      {"/heavywater.v1.AdminService/Drain", kAdmins},
      {"/heavywater.v1.AdminService/Flush", kAdmins},
      {"/heavywater.v1.AdminService/GetConfig", kAdmins},
      {"/heavywater.v1.AdminService/Pin", kAdmins},
      {"/heavywater.v1.AdminService/SetQuota", kAdmins},
      {"/heavywater.v1.AdminService/Snapshot", kAdmins},
      {"/heavywater.v1.AdminService/Stats", kAdmins},
      {"/heavywater.v1.AdminService/Watch", kAdmins},

      {"/heavywater.v1.AttentionService/Attach", kWorkers},
      {"/heavywater.v1.AttentionService/Kept", kWorkers},
      {"/heavywater.v1.AttentionService/ReadKv", kWorkers},
      {"/heavywater.v1.AttentionService/Step", kWorkers},

      // Engines, which may do what ranks may: values have no tenant.
      {"/heavywater.v1.BlobService/Erase", kWorkers},
      {"/heavywater.v1.BlobService/Get", kWorkers},
      {"/heavywater.v1.BlobService/Has", kWorkers},
      {"/heavywater.v1.BlobService/Put", kWorkers},

      {"/heavywater.v1.GenerationService/Generate", kClients},
      {"/heavywater.v1.GenerationService/GetModel", kClients},

      {"/heavywater.v1.GroupService/Heartbeat", kWorkers},
      {"/heavywater.v1.GroupService/Join", kWorkers},
      {"/heavywater.v1.GroupService/Leave", kWorkers},
      {"/heavywater.v1.GroupService/Put", kWorkers},
      {"/heavywater.v1.GroupService/ReportPlan", kWorkers},
      {"/heavywater.v1.GroupService/Wait", kWorkers},

      {"/heavywater.v1.PageStoreService/Abort", kWorkers},
      {"/heavywater.v1.PageStoreService/Ask", kWorkers},
      {"/heavywater.v1.PageStoreService/Attach", kWorkers},
      {"/heavywater.v1.PageStoreService/Commit", kWorkers},
      {"/heavywater.v1.PageStoreService/Read", kReaders},
      {"/heavywater.v1.PageStoreService/Reserve", kWorkers},
      {"/heavywater.v1.PageStoreService/Rest", kWorkers},
      {"/heavywater.v1.PageStoreService/Write", kWorkers},

      {"/heavywater.v1.SequenceService/Close", kReaders},
      {"/heavywater.v1.SequenceService/Fork", kReaders},
      {"/heavywater.v1.SequenceService/Get", kReaders},
      {"/heavywater.v1.SequenceService/GetSets", kReaders},
      {"/heavywater.v1.SequenceService/List", kReaders},
      {"/heavywater.v1.SequenceService/Open", kWorkers},
      {"/heavywater.v1.SequenceService/ReadSnapshot", kWorkers},
      {"/heavywater.v1.SequenceService/Reopen", kWorkers},
      {"/heavywater.v1.SequenceService/Resume", kReaders},
      {"/heavywater.v1.SequenceService/Suspend", kReaders},
      {"/heavywater.v1.SequenceService/Truncate", kReaders},
  };
  return *table;
}

}  // namespace

std::string RoleSet::Names() const {
  std::string names;
  for (const Role role : {Role::kClient, Role::kWorker, Role::kAdmin}) {
    if (contains(role)) absl::StrAppend(&names, names.empty() ? "" : " or ", RoleName(role));
  }
  return names;
}

std::optional<RoleSet> RolesOf(absl::string_view method) {
  const auto found = Table().find(method);
  if (found == Table().end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> MethodsWithRoles() {
  std::vector<std::string> methods;
  for (const auto& [method, roles] : Table()) methods.emplace_back(method);
  return methods;
}

}  // namespace heavywater
