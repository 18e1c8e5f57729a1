#!/bin/sh
# Prints what this device is, one `key=value` a line; edgesdk/deploy/facts.py reads it. Changes
# nothing. For any POSIX shell (dash, busybox ash, Android's mksh) with grep, sed and df; what cannot
# be found out is left out. It may come through standard input, so nothing below reads from there.
#
# usage: device_facts.sh [WORK_FOLDER]

PATH=$PATH:/sbin:/usr/sbin:/system/bin
work_folder=${1:-/}

say() {
    [ -z "$2" ] || printf '%s=%s\n' "$1" "$2"
}

say_file() {
    if [ -r "$2" ]; then say "$1" "$(tr -d '\000' <"$2" 2>/dev/null | head -n 1)"; fi
}

say system "$(uname -s)"
say machine "$(uname -m)"
say kernel "$(uname -r)"

say android_sdk "$(getprop ro.build.version.sdk </dev/null 2>/dev/null)"
say android_release "$(getprop ro.build.version.release </dev/null 2>/dev/null)"
if [ -r /etc/os-release ]; then
    sed -n 's/^ID=/os_id=/p; s/^VERSION_ID=/os_version=/p' /etc/os-release | tr -d "\"'"
fi

# The header of an ELF file of the system tells what programs it runs: a 64-bit kernel may carry a
# 32-bit system, and then `uname -m` is no help.
for program in /bin/sh /system/bin/sh; do
    [ -r "$program" ] || continue
    header=$(od -An -v -tx1 -N40 "$program" 2>/dev/null) ||
        header=$(hexdump -v -n 40 -e '1/1 " %02x"' "$program" 2>/dev/null)
    # shellcheck disable=SC2086,SC2116  # joins the lines
    say elf "$(echo $header)"
    break
done

# What libc there is. Each of these prints a version or fails; the first answer is enough.
libc_answer() {
    text=$("$@" </dev/null 2>&1 | head -n 2 | tr '\n' ' ')
    case $text in
        *glibc* | *GLIBC* | *"GNU C Library"* | *"GNU libc"* | *musl*) say libc "$text" ;;
        *) return 1 ;;
    esac
}
libc() {
    libc_answer getconf GNU_LIBC_VERSION && return
    libc_answer ldd --version && return
    for file in /lib/ld-musl-*.so.1 /lib/*/libc.so.6 /lib64/libc.so.6 /lib/libc.so.6; do
        if [ -x "$file" ]; then libc_answer "$file" && return; fi
    done
}
libc

if [ -r /proc/cpuinfo ]; then
    sed -n 's/^Features[[:space:]]*: */features=/p
            s/^flags[[:space:]]*: */flags=/p
            s/^isa[[:space:]]*: */isa=/p
            s/^model name[[:space:]]*: */model_name=/p' /proc/cpuinfo | sort -u
    # One pair for each core, in order.
    sed -n 's/^CPU implementer[[:space:]]*: */implementer=/p
            s/^CPU part[[:space:]]*: */part=/p' /proc/cpuinfo
    say processors "$(grep -c '^processor' /proc/cpuinfo)"
fi
say_file cores_online /sys/devices/system/cpu/online

if [ -r /proc/meminfo ]; then
    sed -n 's/^MemTotal: *\([0-9]*\) kB/memory_total_kib=\1/p
            s/^MemAvailable: *\([0-9]*\) kB/memory_available_kib=\1/p' /proc/meminfo
fi

# The work folder itself is made later; its nearest parent is on the same file system.
while [ ! -d "$work_folder" ] && [ "$work_folder" != / ]; do
    work_folder=$(dirname "$work_folder")
done
# shellcheck disable=SC2046  # splits the line: file system, blocks, used, available, ...
set -- $(df -Pk "$work_folder" 2>/dev/null | tail -n 1)
say disk_available_kib "$4"

for policy in /sys/devices/system/cpu/cpufreq/policy*; do
    say_file governor "$policy/scaling_governor"
    say_file frequency_khz "$policy/scaling_cur_freq"
    say_file max_frequency_khz "$policy/cpuinfo_max_freq"
done
for zone in /sys/class/thermal/thermal_zone*; do
    say_file temperature_mc "$zone/temp"
done
# Raspberry Pi: the firmware's record of low voltage and heat.
say throttled "$(vcgencmd get_throttled </dev/null 2>/dev/null | sed 's/^throttled=//')"

# NVIDIA's GPUs. On a Jetson the device tree names the module and the chip ("nvidia,p3767-0005
# nvidia,tegra234"), and the first line of this file the release of its system.
if [ -r /proc/device-tree/compatible ]; then
    say compatible "$(tr '\000' ' ' </proc/device-tree/compatible)"
fi
say_file l4t /etc/nv_tegra_release
say power_mode "$(nvpmodel -q </dev/null 2>/dev/null | sed -n 's/^.*NV Power Mode: *//p')"
nvidia_gpu() {
    nvidia-smi "--query-gpu=$1" --format=csv,noheader </dev/null 2>/dev/null | head -n 1
}
gpu=$(nvidia_gpu name,driver_version,compute_cap)
case $gpu in
    *.*,*.*) ;;
    *) gpu=$(nvidia_gpu name,driver_version) ;; # a driver that cannot tell the last
esac
say gpu "$gpu"
# Where edgert looks for the driver's library.
nvidia_library() {
    for file in "$EDGESDK_CUDA_LIBRARY" \
        /usr/lib/*/libcuda.so.1 /usr/lib64/libcuda.so.1 /usr/lib/libcuda.so.1 \
        /usr/lib/*/tegra/libcuda.so.1 /usr/lib/*/nvidia/libcuda.so.1 \
        /usr/lib/*/nvidia/current/libcuda.so.1 /usr/lib/wsl/lib/libcuda.so.1; do
        if [ -e "$file" ]; then
            echo "$file"
            return
        fi
    done
    ldconfig -p </dev/null 2>/dev/null | sed -n 's/.*libcuda\.so\.1 .*=> //p' | head -n 1
}
file=$(nvidia_library)
say nvidia_library "${file:-none}"

# OpenCL: where edgert looks for its library, and what clinfo says of the first device.
opencl_library() {
    for file in "$EDGESDK_OPENCL_LIBRARY" \
        /usr/lib/*/libOpenCL.so.1 /usr/lib64/libOpenCL.so.1 /usr/lib/libOpenCL.so.1 \
        /usr/lib/*/libOpenCL.so /usr/lib/libOpenCL.so /usr/lib/*/libmali.so.1 /usr/lib/libmali.so.1 \
        /usr/lib/*/libmali.so /usr/lib/libmali.so /usr/lib/libPVROCL.so.1 \
        /usr/lib/libVivanteOpenCL.so /usr/lib/libOpenCL_adreno.so.1 \
        /vendor/lib64/libOpenCL.so /system/vendor/lib64/libOpenCL.so /system/lib64/libOpenCL.so \
        /vendor/lib64/libOpenCL-pixel.so /vendor/lib64/egl/libGLES_mali.so /vendor/lib64/libPVROCL.so; do
        if [ -e "$file" ]; then
            echo "$file"
            return
        fi
    done
    ldconfig -p </dev/null 2>/dev/null | sed -n 's/.*libOpenCL\.so\.1 .*=> //p' | head -n 1
}
file=$(opencl_library)
say opencl_library "${file:-none}"
clinfo --raw </dev/null 2>/dev/null |
    sed -n 's/^\[[^]]*\/0\] *\(CL_D[A-Z_]*\)  *\(.*\)$/\1=\2/p' |
    grep -E '^CL_(DEVICE_(NAME|VERSION|EXTENSIONS|LOCAL_MEM_SIZE|MAX_WORK_GROUP_SIZE|MAX_MEM_ALLOC_SIZE|GLOBAL_MEM_SIZE|IMAGE_SUPPORT|MAX_NUM_SUB_GROUPS)|DRIVER_VERSION)='

board=$(say board "$(getprop ro.product.model </dev/null 2>/dev/null)")
[ -n "$board" ] || board=$(say_file board /proc/device-tree/model)
[ -n "$board" ] || board=$(say_file board /sys/class/dmi/id/product_name)
[ -z "$board" ] || echo "$board"
say end yes
