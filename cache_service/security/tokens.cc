#include "cache_service/security/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache_service/base/status.h"
#include "cache_service/security/small_file.h"

namespace heavywater {
namespace {

constexpr size_t kMaxTokens = 10'000;
constexpr size_t kMaxTenantBytes = 128;

uint64_t KeyOf(const TokenHash& hash) {
  uint64_t key = 0;
  std::memcpy(&key, hash.data(), sizeof(key));
  return key;
}

absl::Status WrongLine(int line, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", what));
}

absl::StatusOr<TokenHash> ParseHash(absl::string_view hex, int line) {
  TokenHash hash{};
  bool good = hex.size() == 2 * hash.size();
  for (const char c : hex) good = good && absl::ascii_isxdigit(static_cast<unsigned char>(c));
  if (!good) return WrongLine(line, "the first word is no SHA-256 in 64 hexadecimal digits");
  const std::string bytes = absl::HexStringToBytes(hex);
  std::memcpy(hash.data(), bytes.data(), hash.size());
  return hash;
}

absl::StatusOr<Caller> ParseCaller(absl::string_view role, absl::string_view tenant, int line) {
  Caller caller;
  bool known = false;
  for (const Role one : {Role::kClient, Role::kWorker, Role::kAdmin}) {
    if (role != RoleName(one)) continue;
    caller.role = one;
    known = true;
  }
  if (!known) return WrongLine(line, "the role is none of client, worker and admin");
  if (tenant.size() > kMaxTenantBytes) return WrongLine(line, "the tenant has over 128 bytes");
  if (tenant != "*") caller.tenant = std::string(tenant);
  if (caller.role == Role::kClient || caller.tenant.empty()) return caller;
  return WrongLine(line, "workers and admins act for every tenant, want * for the tenant");
}

}  // namespace

const char* RoleName(Role role) {
  switch (role) {
    case Role::kClient:
      return "client";
    case Role::kWorker:
      return "worker";
    case Role::kAdmin:
      return "admin";
  }
  return "";
}

TokenHash HashToken(absl::string_view token) {
  TokenHash hash{};
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

absl::string_view BearerToken(absl::string_view authorization) {
  constexpr absl::string_view kScheme = "Bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return "";
  return absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
}

absl::StatusOr<std::map<TokenHash, Caller>> ParseTokens(absl::string_view text) {
  std::map<TokenHash, Caller> tokens;
  int number = 0;
  for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
    ++number;
    const absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (line.empty() || line.front() == '#') continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() != 3) {
      return WrongLine(number, absl::StrCat("it has ", words.size(),
                                            " words, want the token's SHA-256, role and tenant"));
    }
    HW_ASSIGN_OR_RETURN(const TokenHash hash, ParseHash(words[0], number));
    HW_ASSIGN_OR_RETURN(Caller caller, ParseCaller(words[1], words[2], number));
    if (!tokens.try_emplace(hash, std::move(caller)).second) {
      return WrongLine(number, "this token is there already");
    }
    if (tokens.size() > kMaxTokens) {
      return WrongLine(number, absl::StrCat("there are more than ", kMaxTokens, " tokens"));
    }
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<Tokens>> Tokens::Create(const std::string& path,
                                                       absl::Duration interval,
                                                       OnReload on_reload) {
  std::unique_ptr<Tokens> made(new Tokens(path, std::move(on_reload)));
  HW_ASSIGN_OR_RETURN(made->seen_, ReadSmallFile(path));
  HW_RETURN_IF_ERROR(made->Load(made->seen_));
  made->watch_ = std::make_unique<Periodic>(interval, [tokens = made.get()] { tokens->Refresh(); });
  return made;
}

Tokens::Tokens(std::string path, OnReload on_reload)
    : path_(std::move(path)), on_reload_(std::move(on_reload)) {}

absl::Status Tokens::Load(const std::string& text) {
  const auto parsed = ParseTokens(text);
  if (!parsed.ok()) {
    return absl::Status(parsed.status().code(),
                        absl::StrCat(path_, ": ", parsed.status().message()));
  }
  // A file that is being rewritten must not shut everybody out.
  if (parsed->empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": there is no token in it, want one"));
  }
  auto table = std::make_shared<Table>();
  for (const auto& [hash, caller] : *parsed) {
    (*table)[KeyOf(hash)] = {hash, std::make_shared<const Caller>(caller)};
  }
  MutexLock lock(&mutex_);
  table_ = std::move(table);
  return absl::OkStatus();
}

void Tokens::Refresh() {
  absl::StatusOr<std::string> read = ReadSmallFile(path_);
  if (!read.ok()) {
    // Told once, not every time.
    if (read.status() != unreadable_) on_reload_(read.status());
    unreadable_ = read.status();
    return;
  }
  unreadable_ = absl::OkStatus();
  if (*read == seen_) return;
  seen_ = *std::move(read);
  on_reload_(Load(seen_));
}

std::shared_ptr<const Caller> Tokens::Find(absl::string_view token) const {
  if (token.empty() || token.size() > kMaxTokenBytes) return nullptr;
  std::shared_ptr<const Table> table;
  {
    MutexLock lock(&mutex_);
    table = table_;
  }
  const TokenHash hash = HashToken(token);
  const auto found = table->find(KeyOf(hash));
  if (found == table->end()) return nullptr;
  const auto& [wanted, caller] = found->second;
  return CRYPTO_memcmp(wanted.data(), hash.data(), hash.size()) == 0 ? caller : nullptr;
}

int64_t Tokens::size() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(table_->size());
}

}  // namespace heavywater
