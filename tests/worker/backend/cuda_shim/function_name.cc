// Kernels have no names at run time but those in the executable's symbol table.
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine.h"

namespace heavywater::cuda_shim {
namespace {

// Where the executable was loaded.
uintptr_t LoadAddress() {
  uintptr_t address = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<uintptr_t*>(data) = info->dlpi_addr;
        return 1;  // the first is the executable
      },
      &address);
  return address;
}

std::string Demangled(const char* name) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = demangled != nullptr ? demangled : name;
  std::free(demangled);
  // Without namespaces and parameters.
  result = result.substr(0, result.rfind('('));
  const size_t space = result.find("heavywater::");
  return space == std::string::npos ? result : result.substr(space);
}

std::string FindSymbol(const char* file, uintptr_t value) {
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(file);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(file + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(file + sections[i].sh_offset);
    const char* names = file + sections[sections[i].sh_link].sh_offset;
    for (size_t k = 0; k < sections[i].sh_size / sizeof(*symbols); ++k) {
      if (symbols[k].st_value == value && ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC) {
        return Demangled(names + symbols[k].st_name);
      }
    }
  }
  return "?";
}

}  // namespace

std::string FunctionName(const void* function) {
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  struct stat status = {};
  if (file < 0 || fstat(file, &status) != 0) return "?";
  void* mapped = mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return "?";
  std::string name = FindSymbol(static_cast<const char*>(mapped),
                                reinterpret_cast<uintptr_t>(function) - LoadAddress());
  munmap(mapped, status.st_size);
  return name;
}

}  // namespace heavywater::cuda_shim
