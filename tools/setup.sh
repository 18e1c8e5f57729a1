#!/bin/sh
# Gets this machine ready for `make demo`, `make test` or `make lint`: $1 says which.
#
# System packages come through apt-get, only what is missing and only as root; Python packages go
# into .venv, at the versions of requirements.lock. Asks nothing. With nothing to do it takes a
# moment. Exit code 4: something is missing that it may not install.
set -eu

purpose=${1:?"usage: setup.sh demo|test|lint"}
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }

missing=""

# need PROGRAM-OR-FILE PACKAGE: notes the package unless the program or file is there.
need() {
    case $1 in
        /*) [ -e "$1" ] && return 0 ;;
        # Not in the PATH of an ordinary user.
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 && return 0 ;;
    esac
    missing="$missing $2"
}

system_packages() {
    case $purpose in
        lint) need clang-format clang-format ;;
        test)
            need g++ g++
            need cmake cmake
            need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
            need arm-linux-gnueabihf-g++ g++-arm-linux-gnueabihf
            need riscv64-linux-gnu-g++ g++-riscv64-linux-gnu
            need qemu-aarch64-static qemu-user-static
            # Programs for Windows; edgert's tests want std::thread, which only the posix one has.
            need x86_64-w64-mingw32-g++-win32 g++-mingw-w64-x86-64-win32
            need x86_64-w64-mingw32-g++-posix g++-mingw-w64-x86-64-posix
            need /usr/lib/wine/wine64 wine64
            # The emulated boards.
            need update-binfmts binfmt-support
            need mmdebstrap mmdebstrap
            need arch-test arch-test
            need /usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
            need ssh openssh-client
            # The examples.
            need /usr/include/stb/stb_image.h libstb-dev
            need espeak-ng espeak-ng
            # OpenCL on this CPU.
            need /etc/OpenCL/vendors/pocl.icd "pocl-opencl-icd ocl-icd-libopencl1"
            # Bundles called from C#.
            need mcs mono-mcs
            need mono mono-runtime
            # And from Java.
            need javac default-jdk-headless
            ;;
        demo)
            need g++ g++
            need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
            need qemu-aarch64-static qemu-user-static
            ;;
        *) say "unknown purpose '$purpose'"; exit 2 ;;
    esac
    python=$(find_python) || missing="$missing python3 python3-venv"
}

# Prints the first Python that is new enough and can make virtual environments. A name in the PATH
# may be a version manager's that leads nowhere, so each is tried.
find_python() {
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

install() {
    say "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    # shellcheck disable=SC2086  # a list of package names
    if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } \
        >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        say "apt-get failed; install these yourself:$missing"
        exit 4
    fi
    rm -f "$log"
}

system_packages
if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        say "please install, then try again: sudo apt-get install$missing"
        exit 4
    fi
    install
    missing=""
    system_packages
    if [ -n "$missing" ]; then
        say "apt-get installed its packages, but this is still missing:$missing"
        say "(Python must be 3.11, 3.12 or 3.13, with its venv module)"
        exit 4
    fi
fi

# Renewed when the versions or the project's own entry points change.
wanted=$(cat requirements.lock pyproject.toml | cksum)
stamp=.venv/edgesdk-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi
say "installing Python packages into .venv with $($python --version)"
rm -f "$stamp"
[ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@" </dev/null; }
# The lock names everything, so nothing is looked up beyond it (see its first lines).
pip install --no-deps --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
echo "$wanted" >"$stamp"
