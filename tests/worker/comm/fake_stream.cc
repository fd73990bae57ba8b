// Takes the place of worker/comm/nccl/device_stream.cc.
#include "tests/worker/comm/fake_stream.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/comm/nccl/device_stream.h"

namespace heavywater {
namespace fake_nccl {
namespace {

constexpr int kDevices = 8;
thread_local std::vector<std::shared_ptr<StreamTicket>> t_tickets;
thread_local int t_device = -1;

}  // namespace

std::shared_ptr<StreamTicket> NewTicketOfThisThread() {
  t_tickets.push_back(std::make_shared<StreamTicket>());
  return t_tickets.back();
}

int DeviceOfThisThread() { return t_device; }

}  // namespace fake_nccl

absl::Status UseDevice(int device) {
  if (device < 0 || device >= fake_nccl::kDevices) {
    return absl::InvalidArgumentError(absl::StrCat("there is no device ", device));
  }
  fake_nccl::t_device = device;
  return absl::OkStatus();
}

absl::Status SynchronizeStream(const Stream& stream) {
  for (const auto& ticket : fake_nccl::t_tickets) ticket->Wait();
  fake_nccl::t_tickets.clear();
  return absl::OkStatus();
}

}  // namespace heavywater
