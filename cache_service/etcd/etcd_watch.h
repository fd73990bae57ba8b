// A stream of changes from etcd.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_service/etcd/etcd_rpc.grpc.pb.h"

namespace heavywater {

struct EtcdEntry {
  std::string key;
  std::string value = {};
  int64_t revision = 0;  // of its last change
};

struct EtcdEvent {
  bool deleted = false;
  EtcdEntry entry;  // of a deletion: key and revision
};

// One thread calls Next(), any may call Cancel().
class EtcdWatch {
 public:
  // `first`: of keys from there to `end`, from its start_revision on.
  EtcdWatch(etcdserverpb::Watch::Stub& stub, std::unique_ptr<grpc::ClientContext> context,
            const etcdserverpb::WatchCreateRequest& first);
  ~EtcdWatch();

  // Waits for the next changes, in their order; none: the watch has begun, or etcd says that
  // nothing has changed. OUT_OF_RANGE: some before have been compacted away, list anew;
  // UNAVAILABLE: the stream broke off; CANCELLED.
  absl::StatusOr<std::vector<EtcdEvent>> Next();
  void Cancel();

 private:
  const std::unique_ptr<grpc::ClientContext> context_;
  const std::unique_ptr<
      grpc::ClientReaderWriter<etcdserverpb::WatchRequest, etcdserverpb::WatchResponse>>
      stream_;
};

}  // namespace heavywater
