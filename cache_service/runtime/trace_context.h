// Which request a log line belongs to, across processes: the trace ids of W3C Trace Context
// (the header "traceparent", which OpenTelemetry's gRPC instrumentation sends).
#pragma once

#include <string>
#include <string_view>

namespace grpc {
class ClientContext;
class ServerContextBase;
}  // namespace grpc

namespace heavywater {

// 32 hexadecimal digits of "00-<trace id>-<parent id>-<flags>"; empty where the header is not
// one, or its trace id is all zeros.
std::string TraceIdOf(std::string_view traceparent);
// Of a call; empty: its client has sent none.
std::string TraceIdOf(const grpc::ServerContextBase& context);
// Random.
std::string NewTraceId();

// While it lives, the log lines of this thread end with the field "trace", and
// SendTrace() passes the id on. An empty id: nothing does. They nest.
class ScopedTrace {
 public:
  explicit ScopedTrace(std::string trace_id);
  explicit ScopedTrace(const grpc::ServerContextBase& context) : ScopedTrace(TraceIdOf(context)) {}
  ~ScopedTrace();
  ScopedTrace(const ScopedTrace&) = delete;
  ScopedTrace& operator=(const ScopedTrace&) = delete;

  // Of this thread; empty: none.
  static const std::string& Current();

 private:
  std::string before_;
};

// The call belongs to this thread's trace, if there is one.
void SendTrace(grpc::ClientContext& context);

}  // namespace heavywater
