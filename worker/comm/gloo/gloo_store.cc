#include "worker/comm/gloo/gloo_store.h"

#include <gloo/common/error.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace heavywater {

void GlooStore::Fail(absl::Status status) {
  status_ = std::move(status);
  throw gloo::IoException(std::string(status_.message()));
}

void GlooStore::set(const std::string& key, const std::vector<char>& data) {
  absl::Status put = store_.Put(absl::StrCat(key_prefix_, key), {data.begin(), data.end()});
  if (!put.ok()) Fail(std::move(put));
  seen_[key] = data;
}

std::vector<char> GlooStore::get(const std::string& key) {
  const absl::Duration left = std::max(deadline_ - absl::Now(), absl::ZeroDuration());
  absl::StatusOr<std::string> value = store_.Wait(absl::StrCat(key_prefix_, key), left);
  if (!value.ok()) Fail(value.status());
  return seen_[key] = {value->begin(), value->end()};
}

void GlooStore::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) get(key);
}

// The deadline of the whole connection bounds every wait; Gloo's own, shorter
// time-out is meant for one message.
void GlooStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) {
  wait(keys);
}

}  // namespace heavywater
