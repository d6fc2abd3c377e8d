"""Shut this process in, then become the program: what runs between a scoring process and code that a model wrote.

    isolate.py '{"program", "memory_mb", "seconds", "readable", "scratch", "namespaces", "environment", "report"}'

It runs alone, before any of that code: this file imports nothing of verl. What could not be done is written, as JSON,
into the open file `report`; without system call filter or without protection of files nothing is run at all.

    limits         CPU time, address space, size of a file, open files (and threads, where the kernel counts them here)
    namespaces     user, network, mounts with a small file system in memory of its own, IPC; only where they are allowed
    Landlock       reads Python and the system's libraries, writes its scratch folder if that is in memory, nothing else
    system calls   no process, socket, signal, trace or shared memory, nothing that changes what others own
    privileges     none, also for root

A program that dies with its parent and starts no process leaves nothing behind.
"""

import ctypes
import json
import math
import os
import platform
import resource
import struct
import sys

FILE_BYTES, SCRATCH_BYTES, SCRATCH_FILES, OPEN_FILES, THREADS = 16 << 20, 64 << 20, 1024, 64, 64

# <linux/sched.h>, <sys/mount.h>, <linux/prctl.h>
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x40000000
_PRIVATE_RECURSIVELY, _NO_SETUID_NO_DEVICES = 0x44000, 0x6
_DIE_WITH_PARENT, _SET_SECCOMP, _NO_NEW_PRIVILEGES, _FILTER = 1, 22, 38, 2
_CAPABILITY_VERSION = 0x20080522

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: its column in the tables below, its number in <linux/audit.h>."""

_DENIED = (
    # Signals to other processes, and handles of them.
    "kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, "
    "pidfd_send_signal 424 424, pidfd_open 434 434, pidfd_getfd 438 438",
    # New processes and namespaces (a namespace of its own would bring back privileges).
    "fork 57 -, vfork 58 -, unshare 272 97, setns 308 268",
    # Network. A pair of connected sockets is harmless.
    "socket 41 198, bind 49 200, connect 42 203, io_uring_setup 425 425",
    # The memory of other processes, and the kernel's own machinery.
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, "
    "process_mrelease 448 448, kcmp 312 272, perf_event_open 298 241, bpf 321 280, userfaultfd 323 282",
    # How other processes of the same user are scheduled.
    "setpriority 141 140, sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274, "
    "sched_setaffinity 203 122, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239",
    # Modes, owners, times and attributes of files, which Landlock does not cover, and truncation, which it does since
    # Linux 6.2. C libraries open files by openat.
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
    "fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, "
    "fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, "
    "removexattrat 466 466, file_setattr 469 469, truncate 76 45, open 2 -, creat 85 -, openat2 437 437, "
    "open_by_handle_at 304 265, inotify_add_watch 254 27, fanotify_init 300 262, fanotify_mark 301 263",
    # Memory that is shared or not counted, and keys of the user.
    "shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, "
    "msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, "
    "memfd_create 319 279, "
    "memfd_secret 447 447, add_key 248 217, request_key 249 218, keyctl 250 219",
)
"""System calls that fail with EPERM: name, number on x86_64, number on aarch64."""

_ANY, _TRUNCATE, _ACCESS_MODE, _THREAD = 0xFFFFFFFF, 0o1000, 0o3, 0x10000
_DENIED_IF = (
    ("openat 257 56", 2, _TRUNCATE | _ACCESS_MODE, _TRUNCATE),  # truncation of what may only be read
    ("clone 56 220", 0, _THREAD, 0),  # a process; threads are allowed
    ("fcntl 72 25", 1, _ANY, 8),  # signals through a pipe: F_SETOWN, F_SETSIG, F_SETOWN_EX
    ("fcntl 72 25", 1, _ANY, 10),
    ("fcntl 72 25", 1, _ANY, 15),
    ("fcntl 72 25", 1, _ANY, 1024),  # F_SETLEASE: makes others wait who open the file
    ("ioctl 16 29", 1, _ANY, 0x8901),  # the same: FIOSETOWN, SIOCSPGRP
    ("ioctl 16 29", 1, _ANY, 0x8902),
    ("prctl 157 167", 0, _ANY, _DIE_WITH_PARENT),
)
"""Denied where (argument & mask) == value: the call, the number of the argument, mask, value."""
_DENIED_UNLESS = (
    ("prlimit64 302 261", 0, _ANY, 0),  # limits of other processes
    ("socketpair 53 199", 0, _ANY, 1),  # other families than AF_UNIX
    (
        "socketpair 53 199",
        1,
        0xF,
        1,
    ),  # other types than SOCK_STREAM: datagrams of a pair can be sent to anyone
)
_CLONE3 = 435  # the C library goes on with clone, whose flags can be seen

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _CAPSET = 444, 445, 446, (126, 91)
_EXECUTE, _READ_FILE, _READ_FOLDER = 1, 4, 8
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
"""By version of Landlock: every right over files that it knows."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what, function, *arguments):
    """The result of a C function. OSError names `what` could not be done."""
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _system_call(what, number, *arguments):
    return _call(what, _libc.syscall, ctypes.c_long(number), *arguments)


def _prctl(what, option, *arguments):
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, 0, 0, 0, 0)[:4]]
    _call(what, _libc.prctl, option, *values)


def namespaces(scratch):
    """Leave the system's network, IPC and mounts; a small file system in memory at `scratch`. OSError where that is not
    allowed."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _libc.unshare, _NEW_USER | _NEW_NETWORK | _NEW_IPC | _NEW_MOUNTS)
    ids = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in ids.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("mount", _libc.mount, b"none", b"/", None, ctypes.c_ulong(_PRIVATE_RECURSIVELY), None)
    options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=700".encode()
    flags = ctypes.c_ulong(_NO_SETUID_NO_DEVICES)
    _call("mount", _libc.mount, b"none", scratch.encode(), b"tmpfs", flags, options)


def limit(memory_mb, seconds, threads):
    """Limits that the kernel enforces on this process and that it cannot raise again."""
    values = {
        resource.RLIMIT_CPU: math.ceil(seconds),
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if threads:
        values[resource.RLIMIT_NPROC] = threads
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def landlock(readable, writable):
    """Only these files can be opened. OSError where the kernel has no Landlock."""
    version = _system_call("Landlock, which protects files", _LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    attributes = struct.pack("Q", handled)
    rules = _system_call("Landlock", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for rights, places in ((_EXECUTE | _READ_FILE | _READ_FOLDER, readable), (handled, writable)):
        for place in places:
            try:
                opened = os.open(place, os.O_PATH)
            except OSError:
                continue
            allowed = rights if os.path.isdir(place) else rights & (_EXECUTE | _READ_FILE)
            rule = struct.pack("=Qi", allowed, opened)
            _system_call("Landlock", _LANDLOCK_ADD, rules, 1, rule, 0)
            os.close(opened)
    _system_call("Landlock", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def filter_program(column, architecture):
    """The filter of system calls, as the kernel's byte code (see <linux/bpf_common.h>)."""
    load, equal, at_least, mask, end = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, deny, missing, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:  # the calls of the x32 interface have numbers of their own
        lines += [(at_least, 0, 1, 0x40000000), (end, 0, 0, deny)]

    def number(row):
        return row.split()[1 + column]

    for row in ", ".join(_DENIED).split(", "):
        if number(row) != "-":
            lines += [(equal, 0, 1, int(number(row))), (end, 0, 0, deny)]
    for row, argument, bits, value in _DENIED_IF + _DENIED_UNLESS:
        on_equal = (0, 1) if (row, argument, bits, value) in _DENIED_IF else (1, 0)
        lines += [(equal, 0, 5, int(number(row))), (load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]
        lines += [(equal, *on_equal, value), (end, 0, 0, deny), (load, 0, 0, 0)]
    lines += [(equal, 0, 1, _CLONE3), (end, 0, 0, missing), (end, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def shut_in(job):
    """Everything, in the order in which it is possible. Returns why there are no namespaces, or None."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        raise OSError(f"it needs Linux on {' or '.join(_ARCHITECTURES)}, this is {sys.platform} {machine}")
    column, architecture = _ARCHITECTURES[machine]
    without = None
    try:
        if not job["namespaces"]:
            raise OSError("they are not wanted")
        namespaces(job["scratch"])
    except OSError as error:
        without = str(error)
    limit(job["memory_mb"], job["seconds"], THREADS if without is None else None)
    os.chdir(job["scratch"])
    _prctl("no new privileges", _NO_NEW_PRIVILEGES, 1)
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _system_call("dropping privileges", _CAPSET[column], header, nothing)
    _prctl("dying with the parent", _DIE_WITH_PARENT, 9)
    landlock(job["readable"], [job["scratch"]] if without is None else [])
    code = ctypes.create_string_buffer(filter_program(column, architecture))
    program = struct.pack("HxxxxxxP", (len(code) - 1) // 8, ctypes.addressof(code))
    _prctl("a filter of system calls", _SET_SECCOMP, _FILTER, ctypes.c_char_p(program))
    return without


def main():
    """Shut in, report, become the program."""
    job = json.loads(sys.argv[1])
    os.set_inheritable(job["report"], False)
    try:
        os.write(job["report"], json.dumps({"without_namespaces": shut_in(job)}).encode() + b"\n")
        os.execve(sys.executable, [sys.executable, "-s", "-P", job["program"]], job["environment"])
    except Exception as error:
        os.write(job["report"], json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)


if __name__ == "__main__":
    main()
