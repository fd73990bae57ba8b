// One cache service, as a rank calls it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>

#include "heavywater/v1/group.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"

namespace heavywater {

struct ServiceStubs {
  ServiceStubs(std::string service_address, std::shared_ptr<grpc::Channel> to)
      : address(std::move(service_address)),
        channel(std::move(to)),
        group(v1::GroupService::NewStub(channel)),
        pages(v1::PageStoreService::NewStub(channel)),
        sequences(v1::SequenceService::NewStub(channel)) {}

  const std::string address;
  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::GroupService::Stub> group;
  const std::unique_ptr<v1::PageStoreService::Stub> pages;
  const std::unique_ptr<v1::SequenceService::Stub> sequences;
};

}  // namespace heavywater
