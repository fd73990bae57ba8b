// What the service needs to go on after a restart, as small records by key. Who keeps
// something there puts it in before it answers for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater {

// Of everything below a state folder. Records of the oldest one that is read are records of
// this one, too; another version is never read.
inline constexpr int kStateFormatVersion = 2;
inline constexpr int kOldestStateFormatVersion = 1;

// The first byte of a key says what its record is.
enum class StateKind : char {
  kHeader = 'H',      // one: to what the rest belongs
  kGroup = 'G',       // by name
  kSequence = 'S',    // by sequence
  kReport = 'J',      // by sequence and number: what was reported since
  kRetiring = 'R',    // by sequence, ended while ranks may be writing
  kPages = 'P',       // by sequence: what its pages have in common
  kPage = 'Q',        // by sequence and page
  kClosed = 'C',      // by sequence: request id of the Close
  kBlob = 'B',        // by sequence: the key of the value that its pages are
  kBlobTenant = 'T',  // by sequence: for whom it is, where that was said
  kQuota = 'U',       // by tenant: its own quota
  kPins = 'N',        // by sequence
};

// Keys sort by kind, id and number.
std::string StateKey(StateKind kind);
std::string StateKey(StateKind kind, std::string_view name);
std::string StateKey(StateKind kind, uint64_t id);
std::string StateKey(StateKind kind, uint64_t id, uint64_t number);
// The id, and the number where the key has one. DATA_LOSS: not such a key.
struct StateId {
  uint64_t id = 0;
  uint64_t number = 0;
};
absl::StatusOr<StateId> ParseStateKey(std::string_view key);

// Changes that take effect together, in their order.
class StateBatch {
 public:
  enum class Kind { kPut, kDelete, kDeletePrefix };
  struct Change {
    Kind kind;
    std::string key;
    std::string value;
  };

  void Put(std::string key, std::string value) {
    changes_.push_back({Kind::kPut, std::move(key), std::move(value)});
  }
  void Delete(std::string key) { changes_.push_back({Kind::kDelete, std::move(key), {}}); }
  void DeletePrefix(std::string prefix) {
    changes_.push_back({Kind::kDeletePrefix, std::move(prefix), {}});
  }
  bool empty() const { return changes_.empty(); }
  const std::vector<Change>& changes() const { return changes_; }

 private:
  std::vector<Change> changes_;
};

// Thread safe. Survives the end of the process once Apply() has returned, not the
// machine's.
class StateStore {
 public:
  virtual ~StateStore() = default;

  // All or nothing, in the order of the calls. One that fails (a full disk) ends
  // keeping: what is there is not a state of the service any more, and a restart does
  // not read it. Nobody waits for that, or could do something about it.
  virtual void Apply(const StateBatch& batch) = 0;

  // What was applied is on the medium when this returns: it survives the machine's end, too,
  // as far as the rest does. As broken() where there is no medium.
  virtual absl::Status Sync() { return broken(); }

  // Why nothing is kept any more; OK: it is.
  virtual absl::Status broken() const = 0;

  using Visit = std::function<absl::Status(std::string_view key, std::string_view value)>;
  // All records whose key begins with `prefix`, ascending, up to the first error.
  virtual absl::Status ForEach(const std::string& prefix, const Visit& visit) const = 0;
};

// Numbers in a record, with a checksum at its end.
class RecordWriter {
 public:
  void Add(int64_t value);
  std::string Take();

 private:
  std::string bytes_;
};

// A record that is damaged, too short or too long reads as zeros; Finish() says so.
class RecordReader {
 public:
  explicit RecordReader(std::string_view record);
  int64_t Next();
  // A count of things that take `values` numbers each: never more than are left.
  int64_t NextCount(int64_t values);
  absl::Status Finish() const;  // DATA_LOSS

 private:
  std::string_view left_;
  bool failed_ = false;
};

}  // namespace heavywater
