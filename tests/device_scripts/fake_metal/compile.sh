#!/bin/sh
# compile.sh SOURCE LIBRARY: kernels in Metal's language as a library for this machine, each as
# run_NAME(grid, block, arguments). Memory of a block of threads becomes static, and the code stands
# within the language's namespace, so that its functions come before those of C.
set -eu
here=$(dirname "$0")
{
  sed -E 's/^( +)threadgroup (\w+ \w+\[[0-9]+\];)$/\1static \2/
    s/^using namespace metal;$/namespace metal {/' "$1"
  sed -n -E 's/^kernel void (\w+)\(.*/METAL_ON_HOST(\1)/p' "$1"
  echo '}'
} | g++ -std=c++17 -O1 -ffp-contract=off -march=native -Wall -Werror -Wno-attributes \
  -Wno-unused-variable -Wno-unused-but-set-variable -Wno-maybe-uninitialized -shared -fPIC -I "$here" -x c++ - -o "$2"
