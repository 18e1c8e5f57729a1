#!/usr/bin/env python3
"""Plays the adb command line, with this machine's shell in the place of a phone's.

FAKE_ADB_STATES holds what each phone is, e.g. "A=device B=unauthorized C=old"; a serial that is not
in it is not connected. FAKE_ADB_PATH comes first in the PATH of what runs "on the phone", and each
FAKE_ADB_SET_NAME sets NAME there. Texts and exit codes are those of adb 1.0.41 (29.0.6): recorded,
where no phone was needed for them.
"""

import os
import subprocess
import sys

FEATURES = (
    "shell_v2\ncmd\nstat_v2\nls_v2\nfixed_push_mkdir\napex\nabb\nfixed_push_symlink_timestamp\n"
)


def main(argv: list[str]) -> int:
    states = dict(word.split("=") for word in os.environ["FAKE_ADB_STATES"].split())
    if argv == ["devices"]:
        print("List of devices attached")
        for serial, state in states.items():
            print(f"{serial}\t{'device' if state == 'old' else state}")
        print()
        return 0
    if argv[:1] != ["-s"] or len(argv) < 3:
        print(f"adb: unknown command {argv[:1]}", file=sys.stderr)
        return 1
    state = states.get(argv[1])
    if state is None:
        print(f"error: device '{argv[1]}' not found", file=sys.stderr)
        return 1
    if state in ("unauthorized", "offline"):
        why = ".\nThis adb server's $ADB_VENDOR_KEYS is not set" if state == "unauthorized" else ""
        print(f"error: device {state}{why}", file=sys.stderr)
        return 1
    if argv[2:] == ["features"]:
        print("cmd" if state == "old" else FEATURES, end="")
        return 0
    if argv[2:4] == ["shell", "-T"]:
        return shell(" ".join(argv[4:]))
    print(f"adb: unknown command {argv[2]}", file=sys.stderr)
    return 1


def shell(command: str) -> int:
    """As adbd does: the shell leads a session, and 128 + the number stands for a signal."""
    environment = dict(os.environ)
    environment["PATH"] = os.environ.get("FAKE_ADB_PATH", "") + os.pathsep + os.environ["PATH"]
    for name, value in os.environ.items():
        if name.startswith("FAKE_ADB_SET_"):
            environment[name.removeprefix("FAKE_ADB_SET_")] = value
    process = subprocess.Popen(["/bin/sh", "-c", command], env=environment, start_new_session=True)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
