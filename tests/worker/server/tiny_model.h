// A small Llama with a tokenizer, as a file: what workers in tests load.
#pragma once

#include <memory>
#include <string>

#include "heavywater/v1/config.pb.h"
#include "tests/worker/model/gguf_writer.h"
#include "worker/model/tokenizer.h"

namespace heavywater {

// Token i < 256 is byte i; then a few merges; the last is <end>, which ends turns.
inline constexpr int kTinyVocab = 261;
inline constexpr int kTinyEnd = 260;
inline constexpr int kTinyContext = 64;  // positions
inline constexpr int kTinyLayers = 2;
inline constexpr int kTinyHeadDim = 8;
inline constexpr int kTinyKvHeads = 3;

class TinyModel {
 public:
  TinyModel();
  const std::string& path() const { return file_.path(); }

 private:
  TemporaryFile file_;
};

// Its tokenizer, for tests that need no model.
Tokenizer TinyTokenizer();

// Small pages and chunks, so that a short text crosses their edges.
v1::WorkerConfig TinyConfig(const TinyModel& model, int rank, int size);

}  // namespace heavywater
