#include "worker/model/cuda/cublas_library.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// The major version's name: what this was compiled against.
std::string LibraryName() { return absl::StrCat("libcublas.so.", CUBLAS_VER_MAJOR); }

template <typename Function>
absl::Status Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(LibraryName(), " has no function ", name));
}

absl::StatusOr<CublasLibrary> Load() {
  void* const library = dlopen(LibraryName().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        LibraryName(), " cannot be loaded, which backend \"cuda\" wants: ", dlerror()));
  }
  CublasLibrary cublas;
  HW_RETURN_IF_ERROR(Find(library, "cublasCreate_v2", cublas.create));
  HW_RETURN_IF_ERROR(Find(library, "cublasDestroy_v2", cublas.destroy));
  HW_RETURN_IF_ERROR(Find(library, "cublasSetStream_v2", cublas.set_stream));
  HW_RETURN_IF_ERROR(Find(library, "cublasSetWorkspace_v2", cublas.set_workspace));
  HW_RETURN_IF_ERROR(Find(library, "cublasGemmEx", cublas.gemm_ex));
  HW_RETURN_IF_ERROR(Find(library, "cublasGetStatusString", cublas.status_string));
  return cublas;
}

}  // namespace

absl::StatusOr<const CublasLibrary*> LoadCublas() {
  static const auto* const library = new absl::StatusOr<CublasLibrary>(Load());
  HW_RETURN_IF_ERROR(library->status());
  return &**library;
}

}  // namespace heavywater
