// A short name for "the same weights": ranks compare it when they form a
// group, and stored KV is used only under the same one.
#pragma once

#include <string>

#include "worker/model/gguf_file.h"

namespace heavywater {

// "gguf-" and 16 hex digits: FNV-1a (64 bits) over the header (all metadata and
// the tensor table), the file's size, and three samples of 1 KiB of every
// tensor (its start, middle and end). Milliseconds, whatever the model's size.
// It tells models, revisions, fine-tunes and quantisations apart; it is no
// defence against somebody who edits single weights, nor against bit rot.
std::string ModelFingerprint(const GgufFile& file);

}  // namespace heavywater
