// heavywater-worker as a function, so that tests can put their own communicator
// into an otherwise unchanged worker.
#pragma once

#include "worker/server/worker.h"

namespace heavywater {

// Parses flags and configuration, serves until SIGTERM or SIGINT, drains. 0 when
// it ended as asked; 1 on an error, which is logged; 2 for bad flags or
// configuration, said on standard error.
int WorkerMain(int argc, char** argv, const CommunicatorFactory& connect = ConnectRanks);

}  // namespace heavywater
