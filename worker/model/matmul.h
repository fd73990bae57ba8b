// Products of weights with any number of tokens, on one or more threads: our
// own kernel for a few tokens (bound by memory), oneDNN for more (bound by
// arithmetic), on floats: packed weights are unpacked for it, a panel of rows at a
// time that stays in the second-level cache. Weights stay row-major in one copy:
// embedding look-ups need rows, and oneDNN on plain weights was within 8 % of its
// packed format at 512 tokens.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/model/packed_matmul.h"

namespace heavywater {

// Used by one thread at a time, not always the same one.
//
// With num_threads > 1 an OpenMP pool works beside the caller. GNU OpenMP's
// threads spin while they wait; where ranks share cores, set
// OMP_WAIT_POLICY=passive for the process, or use one thread: then there is no
// pool at all.
class Matmul {
 public:
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(Backend& backend, int num_threads);
  ~Matmul();

  // How many rows `x` and `out` must have room for when there are `tokens`: what
  // lies in the extra ones of x is not used, those of out get undefined values.
  // Few distinct sizes mean few oneDNN primitives.
  static int64_t PaddedTokens(int64_t tokens);

  // args.out_stride >= args.rows. INTERNAL with oneDNN's message;
  // RESOURCE_EXHAUSTED when there is no device memory for its scratchpad.
  absl::Status Run(const MatmulArgs& args);

  // Takes the memory that Run() needs for up to args.tokens tokens and weights of this
  // shape, so that it is accounted for before the first token. Pointers are not used.
  // Same errors.
  absl::Status Reserve(const MatmulArgs& args);

  // Of the scratchpad and the panel.
  int64_t device_bytes() const;

 private:
  class Primitives;

  Matmul(Backend& backend, std::unique_ptr<Primitives> primitives, int num_threads);
  void RunSmall(const MatmulArgs& args) const;
  // Rows [first, first + rows) of args, through oneDNN.
  absl::Status RunPanel(const MatmulArgs& args, int64_t first, int64_t rows);
  void Unpack(const MatmulArgs& args) const;
  absl::Status ReservePanel(int64_t floats);

  Backend& backend_;
  std::unique_ptr<Primitives> primitives_;
  DeviceBuffer panel_;
  int num_threads_;
};

}  // namespace heavywater
