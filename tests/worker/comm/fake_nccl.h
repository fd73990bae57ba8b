// How tests drive the fake NCCL: ranks are threads of one process, device memory is
// host memory. As NCCL does, it joins ranks in the background, runs collectives
// asynchronously in each rank's order, sums in another order than the ranks', does
// not notice when calls differ (the data becomes garbage), and waits for ever for
// a rank that does not come.
//
// A thread's streams are one to it: SynchronizeStream() waits for all that the
// calling thread has queued.
#pragma once

#include <nccl.h>

namespace heavywater::fake_nccl {

// Back to a NCCL without faults. When no communicator is alive.
void Reset();

// The version that ncclGetVersion() reports to the calling thread.
void SetVersionOfThisThread(int version);
// What ncclGetUniqueId() returns from now on.
void SetUniqueIdResult(ncclResult_t result);
// Rank `rank` never gets beyond ncclCommInitRankConfig: its peers wait.
void HoldInit(int rank);

// Rank `rank` takes no part in collectives from now on, and nobody is told.
void Hang(int rank);
// What ncclCommGetAsyncError() reports to rank `rank` from now on.
void SetAsyncError(int rank, ncclResult_t result);

// How many communicators were ended by ncclCommDestroy() and by ncclCommAbort()
// since the last Reset().
int NumDestroyed();
int NumAborted();
int NumAlive();
// Collectives that ranks have queued since the last Reset(), over all ranks.
int NumQueued();

}  // namespace heavywater::fake_nccl
