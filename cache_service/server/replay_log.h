// First answers of mutations by request id, so that a replay gets the same one.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/mutex.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/registry/validate.h"

namespace heavywater {

// Thread safe. The last kMaxAnswers are remembered; two calls with one id that are under way
// at the same time are both carried out.
class ReplayLog {
 public:
  static constexpr size_t kMaxAnswers = 1024;

  // Whether the request was answered before, as `response` then is. INVALID_ARGUMENT: no
  // request id; ALREADY_EXISTS: it was another request's.
  template <typename Request, typename Response>
  absl::StatusOr<bool> Find(const Request& request, Response* response) const {
    HW_RETURN_IF_ERROR(CheckText("request_id", request.request_id(), 1, kMaxNameBytes));
    MutexLock lock(&mutex_);
    const auto found = answers_.find(request.request_id());
    if (found == answers_.end()) return false;
    if (found->second.request != TextOf(request)) {
      return absl::AlreadyExistsError(
          absl::StrCat("request_id \"", request.request_id(), "\" was used for another request"));
    }
    return response->ParseFromString(found->second.response);
  }

  template <typename Request, typename Response>
  void Keep(const Request& request, const Response& response) {
    MutexLock lock(&mutex_);
    const auto [answer, is_new] = answers_.try_emplace(
        request.request_id(), Answer{TextOf(request), response.SerializeAsString()});
    if (!is_new) return;
    order_.push_back(request.request_id());
    if (order_.size() <= kMaxAnswers) return;
    answers_.erase(order_.front());
    order_.pop_front();
  }

 private:
  struct Answer {
    std::string request;
    std::string response;
  };
  template <typename Request>
  static std::string TextOf(const Request& request) {
    return absl::StrCat(request.GetTypeName(), " ", request.SerializeAsString());
  }

  mutable Mutex mutex_;
  std::map<std::string, Answer> answers_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> order_ ABSL_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace heavywater
