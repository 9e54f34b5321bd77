# Shared by quickstart, test, check and bench: `setup quickstart|dev|bench` makes .venv in the checkout complete, once,
# and puts it first in PATH. Sourced, not run; the caller has `set -euo pipefail`.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
# Holds one line "<set> <fingerprint>" for each set of pins that is installed whole; absent while pip works.
INSTALLED=$VENV/vocab-parallel-installed
# Says that these scripts made the folder, so they may delete it.
OURS=$VENV/vocab-parallel-made-this
# A CPU build of torch, Triton and all pins take about 3 GB, pip's unpacking the rest.
NEEDED_MB=4500

setup() { # setup SET: SET names requirements/SET.txt
  local set=$1 python
  cd "$ROOT"
  if ! ready "$set"; then
    python=$(find_python)
    (
      # The lock belongs to descriptor 9 and ends with this subshell, however that ends.
      exec 9>"$ROOT/.venv.lock"
      trap 'exit 130' INT
      lock "$python"
      ready "$set" || install "$set" "$python" # another run may have done it meanwhile
    )
  fi
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
  # byte code is written: else each of the many processes compiles all that it imports
  unset PYTHONHOME PYTHONDONTWRITEBYTECODE
}

die() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

say() { printf '%s\n' "$*" >&2; }

ready() { # is set $1 installed, with the pins of now, in this place, under a Python that still starts?
  [[ -f $INSTALLED ]] && grep -qxF "$1 $(fingerprint "$1")" "$INSTALLED" && "$VENV/bin/python" -c '' 2>/dev/null
}

fingerprint() { # of what set $1 installs and where: the commands in a venv hold its path, so a copied one is no good
  {
    printf '%s\n' "$VENV"
    sed '/^\[tool/,$d' pyproject.toml
    printf '%s\n' "$1"
    cat requirements/*.txt
  } | cksum | tr ' ' '-'
}

pins() { printf 'requirements/%s.txt' "$1"; }

find_python() { # prints the first usable interpreter, or says what is missing
  local candidate seen='' candidates=(python3 python3.13 python3.12 python3.11 python3.10 python)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  local code='import sys; sys.exit(0 if sys.version_info >= (3, 10) else 1)'
  for candidate in "${candidates[@]}"; do
    "$candidate" -c "$code" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      printf '%s' "$candidate"
      return
    fi
    seen=$candidate
  done
  if [[ -n $seen ]]; then
    die "$("$seen" --version) ($seen) has no venv module with pip." "On Debian and Ubuntu: apt-get install python3-venv"
  fi
  die "no Python 3.10 or newer found (tried: ${candidates[*]})." \
    "Install one, or name one: PYTHON=/path/to/python3 $0"
}

lock() { # takes the lock on descriptor 9; through Python, since not every system has flock(1)
  local code='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1] == "try" else 0))'
  "$1" -c "$code" try 2>/dev/null && return
  say "Another run is setting up $VENV; waiting for it."
  "$1" -c "$code" wait
}

install() { # install SET PYTHON
  local set=$1 python=$2 began=$SECONDS kept
  check_disk
  if [[ -e $VENV && ! -e $OURS ]]; then
    die "$VENV exists and was not made by these scripts." "Move it away; the scripts make their own there."
  fi
  # Kept only if it is whole and up to date: another set can then be added to it.
  if ! ready quickstart; then
    rm -rf "$VENV"
    mkdir "$VENV"
    touch "$OURS"
    say "Making .venv with $("$python" --version) ..."
    "$python" -m venv "$VENV"
  fi
  kept=$(grep -vE "^(quickstart|$set) " "$INSTALLED" 2>/dev/null || true) # the pins of all sets agree
  rm -f "$INSTALLED"
  say "Installing requirements/$set.txt (once, a minute or two) ..."
  pip_install -r "$(pins "$set")"
  pip_install --no-deps -r "$(pins data)"
  if [[ -f $(pins "$set-data") ]]; then pip_install --no-deps -r "$(pins "$set-data")"; fi
  pip_install --no-deps --no-build-isolation --editable .
  "$VENV/bin/python" -c 'import torch' || die "torch is installed but cannot be imported (see above)."
  # Every set includes quickstart.txt, so any of them brings the quickstart's.
  printf '%s\n' "quickstart $(fingerprint quickstart)" "$set $(fingerprint "$set")" ${kept:+"$kept"} >"$INSTALLED.new"
  mv "$INSTALLED.new" "$INSTALLED"
  say "Set up in $((SECONDS - began)) s."
}

check_disk() {
  local free_mb
  free_mb=$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1024) }')
  if ((free_mb < NEEDED_MB)); then
    die "setting up needs $NEEDED_MB MB of free disk in $ROOT, but only $free_mb MB are free."
  fi
}

# Errors only: warnings about a machine's own pip configuration would bury them. Byte code is left to the first import
# of what is used: compiling all of it takes longer than the rest of the set-up.
pip_install() {
  PIP_USER=0 "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install -qq --no-compile "$@" ||
    die "pip could not install: $* (its message is above)." "Nothing is kept; run $0 again when the cause is gone."
}
