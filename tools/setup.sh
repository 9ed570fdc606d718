#!/usr/bin/env bash
# Puts in place what dfkv's own build and tests need. Safe to run again; says nothing when nothing is missing.
# usage: setup.sh venv DIR     the Python environment, and a compiler where there is none
#        setup.sh tools        what lint and the native tests need besides
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# One line per need: is it there, and the Debian package that brings it.
missing=()
need() { # PACKAGE TEST...
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
command_exists() { command -v "$1"; }
header_exists() { echo "#include <$1>" | c++ -E -x c++ -; }

sanitizers_link() { echo 'int main() {}' | clang++ -x c++ -fsanitize=address,undefined - -o /dev/null; }

install_missing() {
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
  else
    echo "error: missing on this machine; as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  missing=()
}

find_python() {
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python from 3.10 to 3.13 was found; install python3.11" >&2
  exit 1
}

python_header() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

make_venv() {
  local venv=$1 python version
  python=$(find_python)
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  need g++ command_exists c++
  need "python$version-dev" python_header "$python"
  need "python$version-venv" "$python" -c 'import ensurepip, venv'
  install_missing
  # An environment whose interpreter has gone is made anew.
  "$venv/bin/python" -c '' 2>/dev/null || rm -rf "$venv"
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check -r "$here/requirements.txt"
  link_sources "$venv"
}

# The environment works on the sources, as after `pip install -e`, without a second build.
link_sources() {
  local packages
  packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  dirname "$here" >"$packages/dfkv-sources.pth"
  printf '#!%s\nfrom dfkv_core.cli import main\n\nmain()\n' "$(cd "$1/bin" && pwd)/python" >"$1/bin/dfkv"
  chmod +x "$1/bin/dfkv"
}

install_tools() {
  need ccache command_exists ccache
  need clang command_exists clang++
  need clang-format command_exists clang-format
  need clang-tidy command_exists clang-tidy
  need libclang-rt-dev sanitizers_link
  need doctest-dev header_exists doctest/doctest.h
  need libxxhash-dev header_exists xxhash.h
  need binutils command_exists readelf
  need etcd-server command_exists etcd
  need iperf3 command_exists iperf3
  need redis-server command_exists redis-server
  # SGLang compiles its page hashing on first use.
  need libssl-dev header_exists openssl/evp.h
  install_missing
}

case ${1:-} in
  venv) make_venv "$2" ;;
  tools) install_tools ;;
  *)
    sed -n '2,4p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
